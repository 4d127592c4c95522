"""Smooth curves through poses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.ops._checks import check_at_least_one
from voxelfield.rendering.rigid import quaternions, rotations

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
    rows = torch.cat((poses[:, :3, 3], quaternions(poses[:, :3, :3]), numbers.double()), dim=-1)
    spans = len(poses) if closed else len(poses) - 1
    stations = torch.arange(frames, dtype=torch.float64) * spans / (frames if closed else max(frames - 1, 1))
    curve = _catmull_rom(rows, stations, closed=closed)
    motions = torch.eye(4, dtype=torch.float64).repeat(frames, 1, 1)
    motions[:, :3, :3] = rotations(F.normalize(curve[:, _TURN], dim=-1))
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
        # Of the two quaternions of an orientation, the one that is closer to that of the previous row.
        if around:
            flip = (row[:, _TURN] * around[-1][:, _TURN]).sum(dim=-1) < 0
            row[flip, _TURN] *= -1
        around.append(row)
    a, b, c, d = around
    return 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
