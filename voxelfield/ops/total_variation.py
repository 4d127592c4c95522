"""The gradient of a grid's total variation, added to what is there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.ops._checks import check_dtype, check_same_device, check_tensor
from voxelfield.ops.blocks import check_blocks


@torch.no_grad()
def grid_total_variation_grad_(
    grad: Tensor,
    param: Tensor,
    weights: Tensor | float | Sequence[float],
    *,
    delta: float | None = None,
    blocks: Tensor | None = None,
    block_count: Tensor | None = None,
) -> None:
    r"""Adds the gradient of a grid's total variation to a gradient, in place.

    The total variation is :math:`\sum_{a \in \{x, y, z\}} \frac{w_a}{N_a} \sum_{v, c} h(f_{v + e_a, c} - f_{v, c})`
    with :math:`N_a` pairs of neighbours times channels, as in :meth:`voxelfield.VoxelGrid.total_variation`: :math:`h(d)
    = d^2`, or with ``delta`` :math:`h(d) = d^2` up to :math:`|d| = \delta` and :math:`2 \delta |d| - \delta^2` beyond
    (Huber 1964, doubled), which leaves edges standing.

    Args:
        grad: (X, Y, Z, C) float32, contiguous; written to.
        param: (X, Y, Z, C) float32, contiguous, on the device of ``grad``.
        weights: The weights w of x, y, z: (3,) float32 on the device of ``grad``, where a captured CUDA graph follows
            changes; three numbers; or one for all.
        delta: Difference between neighbours from which on the cost is linear; None for nowhere.
        blocks: Ids (K,) int32 of blocks of vertices, as :func:`voxelfield.ops.active_blocks` lists them, each at most
            once: only gradients in these are written, though with the neighbours outside taken into account. None for
            all vertices.
        block_count: (1,) int32, how many ids are in use; None if ``blocks`` is.

    Raises:
        TypeError: An argument is no tensor, or has the wrong dtype.
        ValueError: A tensor has the wrong shape or device or is not contiguous, or ``delta`` is not positive.
    """
    check_tensor("param", param, ("X", "Y", "Z", "C"))
    check_tensor("grad", grad, tuple(param.shape), " as param has")
    for name, value in (("param", param), ("grad", grad)):
        check_dtype(name, value, (torch.float32,))
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")
    check_same_device("grad", grad, "param", param)
    if delta is not None and not delta > 0:
        raise ValueError(f"delta must be positive, got {delta}")
    if (blocks is None) != (block_count is None):
        raise ValueError("blocks and block_count come together, got only one of them")
    if blocks is not None:
        check_blocks(blocks, block_count, "param", param)
    if not isinstance(weights, Tensor):
        numbers = [weights] * 3 if isinstance(weights, (int, float)) else list(weights)
        # Filled one by one: a tensor made of a list is a copy from the host, which no graph can capture.
        weights = torch.stack([param.new_full((), number) for number in numbers])
    check_tensor("weights", weights, (3,))
    check_dtype("weights", weights, (torch.float32,))
    check_same_device("weights", weights, "param", param)
    _library.ensure_loaded(param.device.type)
    torch.ops.voxelfield.grid_total_variation_grad_(
        grad, param, weights.contiguous(), math.inf if delta is None else delta, blocks, block_count
    )


@_library.when_loaded
def _register() -> None:
    @torch.library.register_fake("voxelfield::grid_total_variation_grad_")
    def _(
        grad: Tensor,
        param: Tensor,
        weights: Tensor,
        delta: float,
        blocks: Tensor | None,
        block_count: Tensor | None,
    ) -> None:
        return None
