"""Smooth curves through poses."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.ops._checks import check_at_least_one

# Columns of the quaternion in the interpolated rows: position, unit quaternion, other numbers.
_TURN = slice(3, 7)


def through_poses(c2w: Tensor, numbers: Tensor, frames: int, *, closed: bool = False) -> tuple[Tensor, Tensor]:
    """Samples a curve that passes through poses, with equal times between consecutive poses.

    Positions, orientations (as quaternions) and numbers follow Catmull-Rom splines (Catmull and Rom 1974).

    Args:
        c2w: (N, 4, 4) floating point rigid motions, N at least 1, on the CPU.
        numbers: (N, K) floating point, other quantities to interpolate.
        frames: Number F of samples on the curve, at least 1. An open curve begins and ends at a pose.
        closed: Whether the curve returns to its first pose, which is not repeated at the end.

    Returns:
        (F, 4, 4) rigid motions and (F, K) numbers, float64.

    Raises:
        ValueError: There are no poses, or ``frames`` is below 1.
    """
    if len(c2w) == 0:
        raise ValueError("c2w must hold at least one pose, got none")
    check_at_least_one("frames", frames)
    poses = c2w.double()
    turns = _nearest_signs(_quaternions(poses[:, :3, :3]))
    rows = torch.cat((poses[:, :3, 3], turns, numbers.double()), dim=-1)
    spans = len(poses) if closed else len(poses) - 1
    stations = torch.arange(frames, dtype=torch.float64) * spans / (frames if closed else max(frames - 1, 1))
    curve = _catmull_rom(rows, stations, closed=closed)
    motions = torch.eye(4, dtype=torch.float64).repeat(frames, 1, 1)
    motions[:, :3, :3] = _rotations(torch.nn.functional.normalize(curve[:, _TURN], dim=-1))
    motions[:, :3, 3] = curve[:, :3]
    return motions, curve[:, 7:]


def _catmull_rom(numbers: Tensor, stations: Tensor, *, closed: bool) -> Tensor:
    """Interpolates rows (N, D) at parameters (F,); whole numbers give the rows themselves."""
    count = len(numbers)
    first = stations.floor().long()
    if not closed:
        first = first.clamp(0, max(count - 2, 0))
    t = (stations - first)[:, None]
    around: list[Tensor] = []
    for offset in (-1, 0, 1, 2):
        index = first + offset
        if not closed:
            index = index.clamp(0, count - 1)
        row = numbers[index % count].clone()
        # On a closed curve, the quaternion may have changed its sign after one turn.
        if around:
            flip = (row[:, _TURN] * around[-1][:, _TURN]).sum(dim=-1) < 0
            row[flip, _TURN] *= -1
        around.append(row)
    a, b, c, d = around
    return 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)


def _nearest_signs(quaternions: Tensor) -> Tensor:
    """Flips the sign of each quaternion (N, 4) where this makes it closer to the previous one."""
    chosen = quaternions.clone()
    for index in range(1, len(chosen)):
        if float((chosen[index] * chosen[index - 1]).sum()) < 0:
            chosen[index] = -chosen[index]
    return chosen


def _quaternions(rotations: Tensor) -> Tensor:
    """Returns the unit quaternions (N, 4), w x y z, of rotations (N, 3, 3).

    Each is the dominant eigenvector of Bar-Itzhack's matrix ("New method for extracting the quaternion from a rotation
    matrix", 2000), which needs no special cases.
    """
    r = rotations
    xx, yy, zz = r[:, 0, 0], r[:, 1, 1], r[:, 2, 2]
    k = torch.zeros(len(r), 4, 4, dtype=r.dtype)
    k[:, 0, 0] = xx + yy + zz
    k[:, 0, 1] = k[:, 1, 0] = r[:, 2, 1] - r[:, 1, 2]
    k[:, 0, 2] = k[:, 2, 0] = r[:, 0, 2] - r[:, 2, 0]
    k[:, 0, 3] = k[:, 3, 0] = r[:, 1, 0] - r[:, 0, 1]
    k[:, 1, 1], k[:, 2, 2], k[:, 3, 3] = xx - yy - zz, yy - xx - zz, zz - xx - yy
    k[:, 1, 2] = k[:, 2, 1] = r[:, 0, 1] + r[:, 1, 0]
    k[:, 1, 3] = k[:, 3, 1] = r[:, 0, 2] + r[:, 2, 0]
    k[:, 2, 3] = k[:, 3, 2] = r[:, 1, 2] + r[:, 2, 1]
    return torch.linalg.eigh(k).eigenvectors[..., -1]


def _rotations(quaternions: Tensor) -> Tensor:
    """Returns the rotations (N, 3, 3) of unit quaternions (N, 4), w x y z."""
    w, x, y, z = quaternions.unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
