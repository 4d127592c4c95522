"""Poses of cameras that look at a place, or are turned at random."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.rendering.rigid import pose_matrices

Z = (0.0, 0.0, 1.0)


def looking_at(target: Sequence[float] | Tensor, positions: Tensor, up: Sequence[float] = Z) -> Tensor:
    """Poses (N, 4, 4), OpenGL axes, of cameras at positions (N, 3) that look at a place (3,), or at one each (N, 3)."""
    backward = F.normalize(positions - torch.as_tensor(target), dim=-1)
    right = F.normalize(torch.linalg.cross(torch.tensor(up).expand_as(backward), backward), dim=-1)
    return pose_matrices(torch.stack((right, torch.linalg.cross(backward, right), backward), dim=-1), positions)


def random_rotations(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Rotations (N, 3, 3)."""
    axes, _ = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator))
    return axes * torch.linalg.det(axes).sign()[:, None, None]
