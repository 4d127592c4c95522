"""Where the subject of a capture lies, when nothing but cameras or sparse points say so."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from voxelfield.grids.nested_boxes import NestedBoxes

_OUTLIERS = 0.01
# Of nested boxes: how large the smallest is beside the cube of the cameras, how many there are where no points say so,
# within what limits points say so, and where rays begin, in halves of the smallest one's edge.
_INNERMOST = 0.25
_BOXES = 6
_FEWEST_BOXES, _MOST_BOXES = 5, 8
_NEAR = 0.05
_MARGIN = 0.05


def box_of_points(points: Tensor) -> Tensor:
    """Returns a box around points that structure from motion found; a hundredth may lie outside at each side.

    Args:
        points: (M, 3) world units, M at least 1.

    Returns:
        (2, 3), larger than what it holds by a twentieth at each side; float64.
    """
    points = points.double()
    low, high = (torch.quantile(points, share, dim=0) for share in (_OUTLIERS, 1 - _OUTLIERS))
    margin = _MARGIN * (high - low).clamp(min=1e-6)
    return torch.stack((low - margin, high + margin))


def box_of_cameras(c2w: Tensor) -> Tensor:
    """Returns a cube about the point that cameras look at, as large as half of them are far from it.

    The point is the nearest to all optical axes, in the least squares. Where cameras look away from it, as from within
    a room, the cube is about the cameras instead, and reaches twice as far from their mean as the farthest does.

    Args:
        c2w: (N, 4, 4) camera to world, OpenGL axes, N at least 1.

    Returns:
        (2, 3) world units; float64.
    """
    c2w = c2w.double()
    origins, looks = c2w[:, :3, 3], -c2w[:, :3, 2]
    across = torch.eye(3, dtype=torch.float64) - looks[:, :, None] * looks[:, None, :]
    # gelsd takes what is nearest to the cameras' mean where the axes are parallel.
    mean = origins.mean(dim=0)
    offset = (across @ (origins - mean)[..., None]).sum(dim=0)
    centre = mean + torch.linalg.lstsq(across.sum(dim=0), offset, driver="gelsd").solution[:, 0]
    depth = ((centre - origins) * looks).sum(dim=-1)
    if float(depth.median()) > 0:
        reach = (origins - centre).norm(dim=-1).median()
    else:
        centre, reach = mean, 2 * (origins - mean).norm(dim=-1).max().clamp(min=0.5)
    return torch.stack((centre - reach, centre + reach))


def box_of_frusta(c2w: Tensor, slopes: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """Returns the smallest box around all that cameras see between two depths.

    Args:
        c2w: (N, 4, 4) camera to world, OpenGL axes, N at least 1.
        slopes: (N, 2) how far the images reach from their centres along x and y, at a depth of 1.
        near: (N,) smaller depth along the optical axis, world units.
        far: (N,) larger depth.

    Returns:
        (2, 3) world units; float64.
    """
    c2w = c2w.double()
    signs = torch.tensor([[x, y] for x in (-1.0, 1.0) for y in (-1.0, 1.0)], dtype=torch.float64)
    at_one = torch.cat((signs * slopes[:, None].double(), -torch.ones(len(c2w), 4, 1, dtype=torch.float64)), dim=-1)
    corners = torch.cat([at_one * depth.double()[:, None, None] for depth in (near, far)], dim=1)
    world = (corners @ c2w[:, :3, :3].mT + c2w[:, None, :3, 3]).view(-1, 3)
    return torch.stack((world.amin(dim=0), world.amax(dim=0)))


def nested_boxes_of_cameras(c2w: Tensor, points: Tensor | None = None) -> NestedBoxes:
    """Returns nested boxes about what cameras look at, for photographs that show what is around, too.

    The smallest holds what is nearest to the middle of all images: a quarter of the cube of :func:`box_of_cameras`.

    Args:
        c2w: (N, 4, 4) camera to world, OpenGL axes, N at least 1.
        points: (M, 3) points that structure from motion found, world units. The largest box holds nearly all of them.
    """
    cube = box_of_cameras(c2w)
    centre, half = cube.mean(dim=0), _INNERMOST * (cube[1] - cube[0]) / 2
    count = _BOXES
    if points is not None and len(points) > 0:
        far = ((points.double() - centre).abs() / half).amax(dim=-1)
        reach = float(torch.quantile(far, 1 - _OUTLIERS))
        count = min(max(math.ceil(math.log2(max(reach, 1.0))) + 1, _FEWEST_BOXES), _MOST_BOXES)
    low, high = torch.stack((centre - half, centre + half)).tolist()
    return NestedBoxes((tuple(low), tuple(high)), count, near=_NEAR * float(half.max()))
