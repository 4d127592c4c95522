"""A smooth path through key frames."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.viewer.drawing.viewpoint import Viewpoint


def between(keys: Sequence[Viewpoint], frames: int, *, closed: bool = False) -> list[Viewpoint]:
    """Returns the stations of a smooth path through key frames, which take equal times.

    Positions, orientations and fields of view follow Catmull-Rom splines, orientations as quaternions.

    Args:
        keys: At least one key frame.
        frames: Number of stations, at least 1. An open path begins and ends at a key frame.
        closed: Whether the path returns to its first key frame, which then is not repeated at the end.

    Raises:
        ValueError: There are no key frames, or ``frames`` is below 1.
    """
    if not keys:
        raise ValueError("keys must be at least one key frame, got none")
    if frames < 1:
        raise ValueError(f"frames must be at least 1, got {frames}")
    poses = torch.stack([key.matrix for key in keys]).double()
    turns = _nearest_signs(_quaternions(poses[:, :3, :3]))
    fovs = torch.tensor([[key.fov] for key in keys], dtype=torch.float64)
    numbers = torch.cat((poses[:, :3, 3], turns, fovs), dim=-1)
    spans = len(keys) if closed else len(keys) - 1
    stations = torch.arange(frames, dtype=torch.float64) * spans / (frames if closed else max(frames - 1, 1))
    path = _catmull_rom(numbers, stations, closed=closed)
    c2w = torch.eye(4, dtype=torch.float64).repeat(frames, 1, 1)
    c2w[:, :3, :3] = _rotations(torch.nn.functional.normalize(path[:, 3:7], dim=-1))
    c2w[:, :3, 3] = path[:, :3]
    return [Viewpoint.of(pose, float(fov)) for pose, fov in zip(c2w, path[:, 7], strict=True)]


def _catmull_rom(numbers: Tensor, stations: Tensor, *, closed: bool) -> Tensor:
    """Interpolates rows (N, D) at stations (F,), of which whole ones are the rows themselves."""
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
        # Once around, a quaternion may have come back with its sign changed.
        if around:
            flip = (row[:, 3:7] * around[-1][:, 3:7]).sum(dim=-1) < 0
            row[flip, 3:7] *= -1
        around.append(row)
    a, b, c, d = around
    return 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)


def _nearest_signs(quaternions: Tensor) -> Tensor:
    """Gives each quaternion (N, 4) the sign by which it is nearer to the one before."""
    chosen = quaternions.clone()
    for index in range(1, len(chosen)):
        if float((chosen[index] * chosen[index - 1]).sum()) < 0:
            chosen[index] = -chosen[index]
    return chosen


def _quaternions(rotations: Tensor) -> Tensor:
    """Returns the unit quaternions (N, 4), w x y z, of rotations (N, 3, 3).

    Each is the dominant eigenvector of Bar-Itzhack's matrix ("New method for extracting the quaternion from a rotation
    matrix", 2000), which has no special cases.
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
