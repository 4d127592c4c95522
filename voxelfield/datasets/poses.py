"""Checks of poses read from files: invalid matrices are refused, and cameras with a wrong convention are detected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.rendering.cameras import Cameras, sees_box
from voxelfield.warps.choice import stray_cameras, viewed_point

FARTHEST = 1e6
"""Largest coordinate of a camera in a scene, world units. Beyond it float32, in which rays are cast, has steps of a
sixteenth."""

_FROM_ORTHONORMAL = 1e-3
_OUTWARD = -0.5  # cosine of the angle between a camera's look and the way to the other cameras
# Of cameras around a subject: the cosine of the angle between a look and the direction of the point that all look at,
# and the length of the mean up direction, at least; and the length of the mean look, at most. Matrices with one of the
# first two below _UNLIKE do not belong to cameras around a subject.
_INWARD = 0.9
_UPRIGHT = 0.5
_ALIKE = 0.9
_UNLIKE = 0.5

OPENCV_AXES = (
    "the poses seem to have OpenCV's axes (y down, looking along z): negate the second and the third column of each"
)
"""Remedy for poses with OpenCV's axes."""

COLMAP_AXES = "the poses seem to have OpenGL's axes, but those of a COLMAP model are OpenCV's: write the model again"
"""The same for COLMAP models, whose axes are fixed."""

_INVERTED = "the matrices seem to be world to camera, but must be camera to world: invert each"


def check_poses(name: Callable[[int], str], c2w: Tensor, middle: Tensor | None = None) -> None:
    """Refuses poses (N, 4, 4) float64 that are not rotations with translations; ``name(index)`` names one in messages.

    Raises:
        ValueError: A matrix is not finite, its axes are more than a thousandth from orthonormal or are a mirror image,
            its last row is not (0, 0, 0, 1), or the camera is farther than :data:`FARTHEST` from the ``middle`` (3,) of
            a capture, by default the origin.
    """
    rotations, last = c2w[:, :3, :3], torch.tensor([0, 0, 0, 1], dtype=c2w.dtype)
    errors = (rotations @ rotations.mT - torch.eye(3, dtype=c2w.dtype)).abs().amax(dim=(-2, -1))
    for good, wanted in (
        (c2w.isfinite().all(dim=(-2, -1)), "be finite"),
        (errors <= _FROM_ORTHONORMAL, "be a rotation with a translation, with orthonormal axes"),
        (torch.linalg.det(rotations) > 0, "be a rotation with a translation, not a mirror image"),
        (((c2w[:, 3] - last).abs() <= _FROM_ORTHONORMAL).all(dim=-1), "have (0, 0, 0, 1) as its last row"),
        (
            ((c2w[:, :3, 3] - (0 if middle is None else middle)).abs() <= FARTHEST).all(dim=-1),
            f"lie within {FARTHEST:g} world units of the {'origin' if middle is None else 'other cameras'} (shift and "
            "scale the scene)",
        ),
    ):
        if not bool(good.all()):
            bad = int((~good).nonzero()[0])
            raise ValueError(f"{name(bad)} must {wanted}, got {c2w[bad].tolist()}")


def scale_of(c2w: Tensor) -> float:
    """Returns the factor that scales the rotations of all poses (N, 4, 4) alike; 1 if none does, or hardly."""
    lengths = c2w[:, :3, :3].norm(dim=-2)
    factor = float(lengths.median())
    alike = 1 / FARTHEST < factor < FARTHEST and bool(((lengths / factor - 1).abs() <= _FROM_ORTHONORMAL).all())
    return factor if alike and abs(factor**2 - 1) > _FROM_ORTHONORMAL else 1.0


def turned_about(c2w: Tensor) -> Tensor:
    """Returns poses (N, 4, 4) with OpenCV's axes as poses with OpenGL's, and the other way round."""
    turned = c2w.clone()
    turned[..., :3, 1:3] *= -1
    return turned


def with_z_up(c2w: Tensor) -> Tensor:
    """Returns poses (N, 4, 4) in a world with y up, such as ARKit's, as poses in one with z up (x, y, z to y, z, x)."""
    return c2w[..., [2, 0, 1, 3], :]


def likely_mistake(c2w: Tensor, format: str = "") -> str | None:
    """Returns the probable mistake in all poses (N, 4, 4) of a capture, with its remedy; None if they look right.

    Cameras that look away from one another may stand in a room, or have OpenCV's axes; those of the ``format`` COLMAP
    have its axes. Of fewer than three, nothing is recognised.
    """
    mistake = inverted(c2w, format == "COLMAP")
    if mistake is not None or len(c2w) < 3 or format == "COLMAP":
        return mistake
    origins = c2w[:, :3, 3]
    towards = F.normalize(origins.mean(dim=0) - origins, dim=-1)
    if float((towards * -c2w[:, :3, 2]).sum(dim=-1).median()) > _OUTWARD:
        return None
    return f"most cameras look away from one another; unless they stood in a room, {OPENCV_AXES}"


def inverted(c2w: Tensor, axes_are_known: bool = False) -> str | None:
    """Returns the remedy if matrices (N, 4, 4) are probably world to camera, otherwise None.

    They are if their inverses are poses of cameras that stand upright around a subject, and they themselves are not.
    """
    if len(c2w) < 3 or _surround(c2w.double(), _UNLIKE):
        return None
    inverse = torch.linalg.inv(c2w.double())
    if _surround(inverse) or (axes_are_known and _surround(turned_about(inverse))):
        return _INVERTED
    if _surround(turned_about(inverse)):
        return f"{_INVERTED}, then negate the second and the third column, because they have OpenCV's axes"
    return None


def _surround(c2w: Tensor, least: float | None = None) -> bool:
    """Returns whether cameras (N, 4, 4) stand upright around a point that all see; ``least`` weakens the bounds."""
    c2w = c2w[~stray_cameras(c2w)]
    origins, looks = c2w[:, :3, 3], -c2w[:, :3, 2]
    inward = (F.normalize(viewed_point(origins, looks) - origins, dim=-1) * looks).sum(dim=-1).median()
    upright = c2w[:, :3, 1].mean(dim=0).norm()
    if least is not None:
        return float(torch.minimum(inward, upright)) >= least
    # Where all look the same way, an inverse does so, too.
    return float(inward) >= _INWARD and float(upright) >= _UPRIGHT and float(looks.mean(dim=0).norm()) <= _ALIKE


def check_cameras_see(cameras: Cameras, aabb: Tensor, format: str = "") -> None:
    """Raises ValueError, with the likely cause, if no training image shows any part of a box (2, 3), world units."""
    if bool(sees_box(cameras, aabb).any()):
        return
    if bool(sees_box(replace(cameras, c2w=turned_about(cameras.c2w)), aabb).any()):
        remedy = COLMAP_AXES if format == "COLMAP" else OPENCV_AXES
    else:
        remedy = "choose another scene.aabb, or check that the poses are camera to world"
    raise ValueError(
        f"cameras of the training images must see scene.aabb, {aabb.tolist()}, got {len(cameras)} that do not: {remedy}"
    )
