"""Estimates where the subject of a capture lies, from its cameras or sparse points alone."""

from __future__ import annotations

import torch
from torch import Tensor

_OUTLIERS = 0.01
_MARGIN = 0.05
_FLATTEST = 1e-3
# Cameras look at one subject from many sides if the median cosine of the angles between their looks and the way to it,
# and the mean squared sine of the angles between their looks and the direction most common to them, are at least these.
# The latter is 0.12 for looks up to 30 degrees away from that direction.
_INWARD = 0.9
_FROM_MANY_SIDES = 0.12
# A camera is astray if it is this many times as far from the median position as three quarters of the cameras are. At
# most this fraction of the cameras can be astray: more belong to the capture.
_ASTRAY = 6.0
_MOST_ASTRAY = 0.1


def box_of_points(points: Tensor) -> Tensor:
    """Returns a box (2, 3) float64 around points (M, 3), at least one, that structure from motion found.

    A hundredth of them may lie outside at each side. There is a margin of a twentieth at each side.
    """
    points = points.double()
    low, high = (torch.quantile(points, q, dim=0) for q in (_OUTLIERS, 1 - _OUTLIERS))
    extent = high - low
    # A wall that all points lie on has no thickness.
    margin = _MARGIN * extent.clamp(min=max(1e-6, _FLATTEST * float(extent.max())))
    return torch.stack((low - margin, high + margin))


def stray_cameras(c2w: Tensor) -> Tensor:
    """Returns which cameras (N,) bool, of poses (N, 4, 4), are so far from all others that poses are probably wrong.

    These are more than six times as far from the median position as three quarters of the cameras are. Where that holds
    for more than a tenth of the cameras, they are not astray, and all are False.
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

    Origins and unit directions are (N, 3) float64, at least one.
    """
    across = torch.eye(3, dtype=torch.float64) - looks[:, :, None] * looks[:, None, :]
    mean = origins.mean(dim=0)
    offset = (across @ (origins - mean)[..., None]).sum(dim=0)
    # gelsd returns the solution nearest to the mean position if the rays are parallel.
    return mean + torch.linalg.lstsq(across.sum(dim=0), offset, driver="gelsd").solution[:, 0]


def look_from_many_sides(looks: Tensor) -> bool:
    """Returns whether unit directions (N, 3), float64, of rays to a point differ enough to determine the point."""
    return float(1 - torch.linalg.eigvalsh(looks.mT @ looks / len(looks))[-1]) >= _FROM_MANY_SIDES


def box_of_cameras(c2w: Tensor) -> Tensor:
    """Returns a cube (2, 3) float64 around the point that cameras (N, 4, 4) look at, at least one.

    Its half edge is the cameras' median distance from that point. Where cameras look away from it, as from within a
    room, the cube lies around the cameras instead, and reaches twice as far from their mean as the farthest does.
    Cameras astray do not count (:func:`stray_cameras`).
    """
    centre, reach, _ = viewed_cube(c2w[~stray_cameras(c2w)].double())
    return torch.stack((centre - reach, centre + reach))


def viewed_cube(c2w: Tensor) -> tuple[Tensor, Tensor, bool]:
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
