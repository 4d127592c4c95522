"""Adds the gradient of a grid's total variation to an existing gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.ops._table import declare


def grid_total_variation_grad_(
    grad: Tensor,
    param: Tensor,
    weights: Tensor | float | Sequence[float],
    *,
    delta: float | None = None,
    tiles: Tensor | None = None,
    tile_count: Tensor | None = None,
) -> None:
    r"""Adds the gradient of a grid's total variation to a gradient, in place.

    The total variation is :math:`\sum_{a \in \{x, y, z\}} \frac{w_a}{N_a} \sum_{v, c} h(f_{v + e_a, c} - f_{v, c})`
    where :math:`N_a` is the number of pairs of neighbours along axis a times the number of channels, as in
    :meth:`voxelfield.VoxelGrid.total_variation`. Without ``delta`` the penalty is :math:`h(d) = d^2`. With ``delta`` it
    is twice the Huber loss (Huber 1964), :math:`d^2` up to :math:`|d| = \delta` and
    :math:`2 \delta |d| - \delta^2` beyond, which preserves edges.

    Args:
        grad: (X, Y, Z, C) float32, contiguous; written to.
        param: (X, Y, Z, C) float32, contiguous, on the device of ``grad``.
        weights: The weights w of x, y, z: a (3,) float32 tensor on the device of ``grad``, which a captured CUDA graph
            reads when it is replayed; three numbers; or one number for all axes.
        delta: Difference between neighbours above which the penalty is linear; None makes it quadratic everywhere.
        tiles: Ids (K,) int32 of tiles of vertices, as listed by :func:`active_tiles`, each at most once. Only gradients
            in these tiles are written; differences to neighbours outside the tiles still count. None for all vertices.
        tile_count: (1,) int32, the number of ids in use; None if ``tiles`` is None.
    """
    if delta is not None and not delta > 0:
        raise ValueError(f"delta must be positive, got {delta}")
    if not isinstance(weights, Tensor):
        numbers = [weights] * 3 if isinstance(weights, (int, float)) else list(weights)
        # torch.tensor(list) would copy from the host, which a CUDA graph cannot capture; new_full fills on the device.
        weights = torch.stack([param.new_full((), number) for number in numbers])
    _grid_total_variation_grad_(
        grad, param, weights.contiguous(), math.inf if delta is None else delta, tiles, tile_count
    )


_grid_total_variation_grad_ = declare("grid_total_variation_grad_")
