"""Estimates where the subject of a capture lies, from its cameras or sparse points alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from voxelfield.warps.nested_boxes import MAX_BOXES, NestedBoxes

_OUTLIERS = 0.01
_MARGIN = 0.05
# Of nested boxes: the share of points outside of the smallest at each side, and how thin it may be beside its longest
# edge; without points its size beside the cube of the cameras, and the number of boxes.
_OUTSIDE_INNERMOST = 0.1
_THINNEST = 0.1
_INNERMOST = 0.25
_BOXES = 6
# With points, the largest size of the smallest box beside the cube of the cameras. It applies if cameras look at one
# subject from many sides: the median cosine of the angles between their looks and the way to it, and the mean squared
# sine of the angles between their looks and the direction most common to them, which is 0.12 for looks up to 30 degrees
# away from it.
_LARGEST_INNERMOST = 0.5
_INWARD = 0.9
_FROM_MANY_SIDES = 0.12
# A camera is astray if it is this many times as far from the median position as three quarters of the cameras are. At
# most this share of the cameras can be astray: more are a part of the capture.
_ASTRAY = 6.0
_MOST_ASTRAY = 0.1
# How far the largest box reaches, at least, in distances of the farthest camera from its centre.
_BEYOND_CAMERAS = 2.0
# Where rays begin: in depths of the nearest points, or in distances of the centre.
_NEAR_OF_NEAREST = 0.3
_NEAR_OF_CENTRE = 0.2
# Cosine of the angle from an optical axis beyond which points are hardly in the image.
_IN_VIEW = 0.5
# Points along each axis of a frustum; and of how many points and cameras quantiles are taken.
_SAMPLES = 8
_MAX_POINTS = 4000
_MAX_CAMERAS = 200


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


def stray_cameras(c2w: Tensor) -> Tensor:
    """Tells which cameras lie so far from all others that their poses are probably wrong.

    Args:
        c2w: (N, 4, 4) camera to world.

    Returns:
        (N,) bool: True for cameras more than six times as far from the median position as three quarters of the cameras
        are. Where that holds for more than a tenth of the cameras, they are not astray, and all are False.
    """
    origins = c2w[:, :3, 3].double()
    if len(origins) == 0:
        return torch.zeros(0, dtype=torch.bool)
    distance = (origins - origins.median(dim=0).values).norm(dim=-1)
    usual = torch.quantile(distance, 0.75)
    astray = (distance > _ASTRAY * usual) & (usual > 0)
    return astray & (int(astray.sum()) <= _MOST_ASTRAY * len(astray))


def viewed_point(origins: Tensor, looks: Tensor) -> Tensor:
    """Returns the point (3,) nearest to rays, in the least squares; of parallel rays, the one nearest to their origins.

    Args:
        origins: (N, 3) float64, N at least 1.
        looks: (N, 3) float64 unit directions.
    """
    across = torch.eye(3, dtype=torch.float64) - looks[:, :, None] * looks[:, None, :]
    mean = origins.mean(dim=0)
    offset = (across @ (origins - mean)[..., None]).sum(dim=0)
    # gelsd returns the solution nearest to the mean position if the rays are parallel.
    return mean + torch.linalg.lstsq(across.sum(dim=0), offset, driver="gelsd").solution[:, 0]


def look_from_many_sides(looks: Tensor) -> bool:
    """Tells whether unit directions (N, 3), float64, of rays to a point differ enough to determine that point well."""
    return float(1 - torch.linalg.eigvalsh(looks.mT @ looks / len(looks))[-1]) >= _FROM_MANY_SIDES


def box_of_cameras(c2w: Tensor) -> Tensor:
    """Returns a cube around the point that cameras look at, whose half edge is the cameras' median distance from it.

    Where cameras look away from that point, as from within a room, the cube lies around the cameras instead, and
    reaches twice as far from their mean as the farthest does. Cameras astray do not count (:func:`stray_cameras`).

    Args:
        c2w: (N, 4, 4) camera to world, OpenGL axes, N at least 1.

    Returns:
        (2, 3) world units; float64.
    """
    centre, reach, _ = _viewed_cube(c2w[~stray_cameras(c2w)].double())
    return torch.stack((centre - reach, centre + reach))


def _viewed_cube(c2w: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Returns the centre (3,) and half edge () of the cube of cameras, and whether they surround a subject there."""
    origins, looks = c2w[:, :3, 3], -c2w[:, :3, 2]
    centre = viewed_point(origins, looks)
    depth = ((centre - origins) * looks).sum(dim=-1)
    if float(depth.median()) > 0:
        distance = (origins - centre).norm(dim=-1)
        inward = float((depth / distance).median()) >= _INWARD
        return centre, distance.median(), inward and look_from_many_sides(looks)
    mean = origins.mean(dim=0)
    return mean, 2 * (origins - mean).norm(dim=-1).max().clamp(min=0.5), False


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


def points_of_frusta(c2w: Tensor, slopes: Tensor, near: Tensor, far: Tensor) -> Tensor:
    """Returns points that fill what cameras see between two depths, as densely as pixels see it.

    Args:
        c2w: (N, 4, 4) camera to world, OpenGL axes, N at least 1.
        slopes: (N, 2) how far the images reach from their centres along x and y, at a depth of 1.
        near: (N,) smaller depth along the optical axis, world units.
        far: (N,) larger depth.

    Returns:
        (M, 3) world units; float64.
    """
    c2w = c2w.double()
    share = (torch.arange(_SAMPLES, dtype=torch.float64) + 0.5) / _SAMPLES
    # Evenly spread in 1 / depth, as the resolution of depth from pictures is.
    depth = 1 / torch.lerp(1 / near.double()[:, None], 1 / far.double()[:, None], share)
    x, y = torch.meshgrid(2 * share - 1, 2 * share - 1, indexing="ij")
    across = torch.stack((x, y), dim=-1).view(1, -1, 2) * slopes.double()[:, None]
    at_one = torch.cat((across, -torch.ones(len(c2w), across.shape[1], 1, dtype=torch.float64)), dim=-1)
    points = (at_one[:, None] * depth[:, :, None, None]).flatten(1, 2)
    return (points @ c2w[:, :3, :3].mT + c2w[:, None, :3, 3]).reshape(-1, 3)


def nested_boxes_of_cameras(c2w: Tensor, points: Tensor | None = None) -> NestedBoxes:
    """Returns nested boxes for photographs that show what is around, too.

    With points, the smallest box holds the middle four fifths of them along each axis, and the largest holds nearly
    all of them, and reaches twice as far as the cameras. Outdoors, most points may belong to the background. So if
    cameras look at a subject from many sides, and the points reach more than halfway to the cameras along an axis, the
    smallest box reaches halfway. Without points, it is a quarter of the cube of :func:`box_of_cameras`, around the
    point that the cameras look at. Cameras astray do not count.

    Args:
        c2w: (N, 4, 4) camera to world, OpenGL axes, N at least 1.
        points: (M, 3) points that structure from motion found, or that fill what is seen, world units.
    """
    c2w = c2w[~stray_cameras(c2w)].double()
    viewed, distance, from_many_sides = _viewed_cube(c2w)
    if points is None or len(points) == 0 or bool((points == points[0]).all()):
        low, high, count = viewed - _INNERMOST * distance, viewed + _INNERMOST * distance, _BOXES
        near = _NEAR_OF_CENTRE * float(distance)
    else:
        # A random subset rather than every n-th point, because the points of frusta have a regular order.
        some = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:_MAX_POINTS]
        points = points[some].double()
        low, high = (torch.quantile(points, share, dim=0) for share in (_OUTSIDE_INNERMOST, 1 - _OUTSIDE_INNERMOST))
        if from_many_sides:
            lowest, highest = viewed - _LARGEST_INNERMOST * distance, viewed + _LARGEST_INNERMOST * distance
            background = (low < lowest) | (high > highest)
            low, high = torch.where(background, lowest, low), torch.where(background, highest, high)
        # A wall that all points lie on has no thickness.
        extent = (points.amax(dim=0) - points.amin(dim=0)).max()
        half = torch.maximum((high - low) / 2, _THINNEST * (high - low).max() / 2).clamp(min=1e-6 * float(extent))
        centre = (low + high) / 2
        low, high = centre - half, centre + half
        reach = torch.quantile(((points - centre).abs() / half).amax(dim=-1), 1 - _OUTLIERS)
        # Every ray shows something, even where structure from motion found no points, as on a dark or blank background.
        # A box that ended at the cameras would hold the background of some of them right in front of others.
        reach = torch.maximum(reach, _BEYOND_CAMERAS * ((c2w[:, :3, 3] - centre).abs() / half).max())
        count = min(max(math.ceil(math.log2(max(float(reach), 1.0))) + 1, 2), MAX_BOXES)
        cameras = c2w[:: -(-len(c2w) // _MAX_CAMERAS)]
        offset = points[:, None] - cameras[:, :3, 3]
        depth = (offset * -cameras[:, :3, 2]).sum(dim=-1)
        depth = depth[depth > _IN_VIEW * offset.norm(dim=-1)]
        near = _NEAR_OF_NEAREST * float(torch.quantile(depth, _OUTLIERS)) if len(depth) else 0.0
    return NestedBoxes((tuple(low.tolist()), tuple(high.tolist())), count, near=near)
