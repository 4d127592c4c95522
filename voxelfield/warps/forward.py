"""Normalised device coordinates for captures of which all photographs face the same way."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.grids.boxes import parse_box
from voxelfield.warps.bounds import box_of_points
from voxelfield.warps.ndc_box import NdcBox
from voxelfield.warps.warp import Row, Window

# Largest angle between an optical axis and the mean of all, degrees.
_LARGEST_ANGLE = 30.0
# Smallest length of the mean of all up directions.
_LEAST_UP = 0.5
# Depth of the near plane, in depths of the nearest points; NeRF's loader of LLFF captures has the same.
_NEAR_OF_NEAREST = 0.75
_OUTLIERS = 0.01
# Smallest depth of the near plane, in depths of the foremost camera.
_NEAREST_PLANE = 4 / 3
# Limits of the grid's depth, in halves of the window's longer edge.
_THINNEST, _THICKEST = 1 / 8, 2.0


class NotForwardError(ValueError):
    """The cameras do not all face the same way, or some are too close to the scene."""


def ndc_box_of_cameras(
    c2w: Tensor,
    border: tuple[Tensor, Tensor],
    points: Tensor | None,
    near: float | None = None,
    widest: float = math.inf,
) -> NdcBox:
    """Returns normalised device coordinates of the mean camera of a capture.

    Along the optical axis, the grid is as deep as the outermost camera's parallax: moving a point by one voxel in depth
    shifts it by one voxel in the view of that camera.

    Args:
        c2w: (N, 4, 4) poses of all photographs, camera to world, OpenGL axes, N at least 1.
        border: Origins and unit directions, both (N, P, 3), of rays along the borders of the images, all of which the
            grid must cover.
        points: (M, 3) points from structure from motion, or points that fill the visible space, world units. None:
            ``near`` must be given, and the box of interest reaches to ten times this depth.
        near: Depth of the near plane, world units; None: three quarters of the depth of the nearest points.
        widest: How many times as wide as one image all of them together may be at the near plane.

    Raises:
        NotForwardError: An optical axis is more than 30 degrees from the mean of all, the up directions cancel, the
            near plane is too close to a camera, the images together are wider than allowed, or a number overflows.
        ValueError: There are neither points nor ``near``.
    """
    if float(c2w[:, :3, 1].double().mean(dim=0).norm()) < _LEAST_UP:
        raise NotForwardError("cameras must agree on the up direction, got directions that cancel")
    reference = _mean_pose(c2w.double())
    axes, position = reference[:, :3], reference[:, 3]
    cosines = (F.normalize(c2w[:, :3, 2].double(), dim=-1) @ axes[:, 2]).clamp(-1, 1)
    angle = float(cosines.acos().rad2deg().max())
    if not angle <= _LARGEST_ANGLE:
        raise NotForwardError(
            f"cameras must look within {_LARGEST_ANGLE:g} degrees of their mean direction, got {angle:.0f} degrees"
        )
    offsets = (c2w[:, :3, 3].double() - position) @ axes
    nearest = _NEAREST_PLANE * max(float((-offsets[:, 2]).max()), 0.0)
    if near is None:
        near = _depth_of_near_plane(points, position, axes)
        if not near > nearest:
            raise NotForwardError(
                f"the near plane must be deeper than {nearest:.4g}, because of the foremost camera, but the nearest "
                f"points put it at {near:.4g}"
            )
    if not near > nearest:
        raise NotForwardError(f"near must be above {nearest:.4g}, because of the foremost camera, got {near:.4g}")
    (low, high), image = _window(border, position, axes, near)
    if float((high - low).max()) > widest * image:
        raise NotForwardError(
            f"images must together be at most {widest:g} times as wide as one at the near plane, got "
            f"{float((high - low).max()) / image:.1f} times"
        )
    half = float((high - low).max()) / 2
    depth = float(offsets[:, :2].norm(dim=-1).max()) / near
    window: Window = ((float(low[0]), float(low[1])), (float(high[0]), float(high[1])))
    rows: list[Row] = [(a, b, c, d) for a, b, c, d in reference.tolist()]
    depth = min(max(depth, _THINNEST * half), _THICKEST * half)
    if points is None or len(points) == 0:
        points = _frustum(window, near, position, axes)
    try:
        warp = NdcBox(parse_box(box_of_points(points)), (rows[0], rows[1], rows[2]), near, window, depth)
        _ = warp.outermost, warp.warped_aabb  # raise if float32 cannot represent them
    except ValueError as error:
        raise NotForwardError(str(error)) from error
    return warp


def _mean_pose(c2w: Tensor) -> Tensor:
    """Returns the camera (3, 4) at the mean position of cameras, with the mean of their directions and up vectors."""
    _, up, backward, position = c2w[:, :3].mean(dim=0).unbind(dim=-1)
    backward = F.normalize(backward, dim=0)
    right = F.normalize(torch.linalg.cross(up, backward), dim=0)
    return torch.stack((right, torch.linalg.cross(backward, right), backward, position), dim=-1)


def _depth_of_near_plane(points: Tensor | None, position: Tensor, axes: Tensor) -> float:
    if points is None or len(points) == 0:
        raise ValueError("near must be given with ndc where no points of the scene are known, got None")
    depths = -((points.double() - position) @ axes[:, 2])
    return _NEAR_OF_NEAREST * float(depths.sort().values[int(_OUTLIERS * len(depths))])


def _window(
    border: tuple[Tensor, Tensor], position: Tensor, axes: Tensor, near: float
) -> tuple[tuple[Tensor, Tensor], float]:
    """Returns the limits (2,) of x / depth and y / depth between which all images lie, and the extent of the widest.

    Raises:
        NotForwardError: A ray does not meet the near plane.
    """
    origins = (border[0].flatten(0, 1).double() - position) @ axes
    directions = border[1].flatten(0, 1).double() @ axes
    forward = -directions[:, 2]
    if not bool((forward > 0).all()):
        raise NotForwardError("rays must meet the near plane, got some that run away from it")
    slopes = directions[:, :2] / forward[:, None]
    at_near = (origins[:, :2] + slopes * (near + origins[:, 2:])) / near
    # Between the near plane and infinity, x / depth and y / depth lie between their values there.
    ends = torch.cat((slopes, at_near))
    each = slopes.view(*border[1].shape[:2], 2)
    return (ends.amin(dim=0), ends.amax(dim=0)), float((each.amax(dim=1) - each.amin(dim=1)).amax())


def _frustum(window: Window, near: float, position: Tensor, axes: Tensor) -> Tensor:
    """Returns the corners (8, 3) of the window's frustum from the near plane to ten times its depth."""
    x, y, depth = (torch.tensor(ends, dtype=torch.float64) for ends in (*zip(*window, strict=True), (near, 10 * near)))
    corners = torch.cartesian_prod(x, y, depth)
    return position + torch.cat((corners[:, :2] * corners[:, 2:], -corners[:, 2:]), dim=-1) @ axes.mT
