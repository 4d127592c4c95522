"""Trilinear interpolation in plain torch: a timed alternative, a float64 reference, and the indices of corners."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

CORNERS = tuple(itertools.product((0, 1), repeat=3))


def cells_of(points: Tensor, resolution: torch.Size) -> tuple[Tensor, Tensor]:
    """Returns each point's lower vertex (N, 3) and its position within the cell (N, 3), in the points' dtype."""
    # One axis at a time: a tensor of the resolution would have to be copied to the device, which synchronises.
    scaled = torch.stack([points[:, axis] * (n - 1) for axis, n in enumerate(resolution)], dim=1)
    lower = torch.stack([scaled[:, axis].long().clamp_(max=n - 2) for axis, n in enumerate(resolution)], dim=1)
    return lower, scaled - lower


def corner_index(lower: Tensor, resolution: torch.Size, corner: tuple[int, ...]) -> Tensor:
    """Returns the row of each point's corner in the grid seen as (X*Y*Z, C)."""
    x, y, z = (lower[:, axis] + corner[axis] for axis in range(3))
    return (x * resolution[1] + y) * resolution[2] + z


def corner_indices(lower: Tensor, resolution: torch.Size) -> Tensor:
    """Returns the rows (N, 8) of each point's corners, in binary order."""
    return torch.stack([corner_index(lower, resolution, corner) for corner in CORNERS], dim=1)


def corner_weights(fraction: Tensor) -> Tensor:
    """Returns the weights (N, 8) of the corners, in binary order."""
    low_high = torch.stack((1 - fraction, fraction))
    x, y, z = (low_high[..., axis] for axis in range(3))
    return torch.stack([x[i] * y[j] * z[k] for i, j, k in CORNERS], dim=1)


def sample(grid: Tensor, points: Tensor) -> Tensor:
    """Samples a grid (X, Y, Z, C) at (N, 3): one gather of all corners, whose backward pass is one scatter."""
    lower, fraction = cells_of(points, grid.shape[:3])
    index = corner_indices(lower, grid.shape[:3])
    corners = grid.view(-1, grid.shape[3]).index_select(0, index.view(-1)).view(*index.shape, -1)
    return (corner_weights(fraction).unsqueeze(2) * corners).sum(1)


def sample_rows(grid: Tensor, points: Tensor) -> Tensor:
    """Samples a grid at a few points in float64, without a float64 copy of the grid."""
    lower, fraction = cells_of(points.double(), grid.shape[:3])
    corners = grid.view(-1, grid.shape[3])[corner_indices(lower, grid.shape[:3])]
    return torch.einsum("nk,nkc->nc", corner_weights(fraction), corners.double())


def splat(values: Tensor, points: Tensor, resolution: torch.Size) -> Tensor:
    """Splats values (N, C) into a float64 grid (X*Y*Z, C): the adjoint of sampling."""
    lower, fraction = cells_of(points.double(), resolution)
    weights = corner_weights(fraction)
    sums = torch.zeros(resolution.numel(), values.shape[1], dtype=torch.float64, device=values.device)
    for k, corner in enumerate(CORNERS):
        sums.index_add_(0, corner_index(lower, resolution, corner), weights[:, k, None] * values.double())
    return sums
