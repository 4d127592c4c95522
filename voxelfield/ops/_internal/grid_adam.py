"""One step of Adam for several grids in one pass over their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.ops._table import declare


def grid_adam_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grads: Sequence[Tensor],
    lrs: Sequence[Tensor | float],
    steps: Sequence[Tensor | float],
    *,
    working: Sequence[Tensor | None] | None = None,
    tiles: Sequence[Tensor | None] | None = None,
    tile_counts: Sequence[Tensor | None] | None = None,
    touched: Sequence[Tensor | None] | None = None,
    channel_rates: Sequence[Tensor | None] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    l2_penalty: float = 0.0,
    skip_untouched: bool = False,
    clear_grad: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    r"""Takes one step of Adam in place, for several grids in one pass over their memory.

    With gradient g (plus ``l2_penalty * param``) and step number t,
    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) g^2`,
    :math:`p \leftarrow (1 - \mathrm{lr} \cdot \mathrm{weight\_decay}) p - \mathrm{lr} \frac{m}{1 - \beta_1^t} /
    (\sqrt{v / (1 - \beta_2^t)} + \epsilon)` (Kingma and Ba 2015; decay: Loshchilov and Hutter 2019). This is the
    rule of :class:`torch.optim.Adam`, or with ``weight_decay`` that of :class:`torch.optim.AdamW`.

    With ``channel_rates`` each channel has its own learning rate in place of lr in these equations. The rate also
    scales the channel's decay, as if each channel were a parameter group.

    The kernels read learning rates, step numbers and lists of tiles from device memory, so a captured CUDA graph uses
    the values of these tensors at the time of its replay.

    Args:
        params: Grids (X, Y, Z, C) float32, contiguous, all on one device.
        exp_avgs: The first moments m, each of its grid's shape, float32 or bfloat16, contiguous. The step is
            computed in float32, and bfloat16 is then rounded to nearest even.
        exp_avg_sqs: The second moments v, of the same shapes and dtypes as ``exp_avgs``, contiguous.
        grads: The gradients g, of the same shapes, float32, contiguous.
        lrs: The learning rate of each grid: a float32 tensor of one element on the grids' device, or a number.
        steps: The number of this step for each grid, counted from 1: a float32 or int64 tensor of one element on the
            grids' device, or a number.
        working: For each grid a float16 or bfloat16 copy, which receives the rounded new values; None for no copy. For
            several copies, at most 8, the copies of a grid follow each other, and all grids have equally many. They may
            be in the memory of other devices that this one can write to.
        tiles: For each grid the ids (K,) int32 of tiles of vertices, as listed by :func:`active_tiles`, each at most
            once; None for all vertices. Parameters, moments and gradients outside these tiles do not change (torch's
            Adam would continue to move parameters by their momentum).
        tile_counts: For each grid (1,) int32, the number of ids in use; None where ``tiles`` is None.
        touched: For each grid a table (K, 5) int32 of vertices, as :func:`touched_vertices` writes it for the same
            tiles. With ``skip_untouched``, which it needs, these vertices are updated, and no other gradients are read.
            None reads all gradients to find those that are not zero.
        channel_rates: For each grid (C,) float32 on its device, contiguous: factors on the learning rate. They must be
            finite and not negative, which is not checked. None means 1 for all channels.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay, as a fraction of the learning rate.
        l2_penalty: Factor of the parameter that is added to its gradient: weight decay as in :class:`torch.optim.Adam`.
        skip_untouched: Do not update a vertex, nor its moments, if the gradients of all its channels are exactly zero
            (the masked Adam of DirectVoxGO, Sun et al. 2022, for whole vertices).
        clear_grad: Set the gradients of the updated vertices to zero.
        grad_scale: Factor that all gradients contain and that is divided out: one float32 number on the grids' device,
            as :class:`torch.amp.GradScaler` keeps it. None means 1.
        found_inf: If this is not 0, no step is taken, and ``clear_grad`` clears the gradients of all vertices: one
            float32 number on the grids' device. None means 0.
    """
    count = len(params)
    if count == 0:
        return
    none: list[Tensor | None] = [None] * count
    optional = (tiles, tile_counts, touched, channel_rates)
    device = params[0].device
    _grid_adam_(
        list(params),
        list(exp_avgs),
        list(exp_avg_sqs),
        list(grads),
        none if working is None else list(working),
        [_on_device(value, device) for value in lrs],
        [_on_device(value, device) for value in steps],
        *(none if tensors is None else list(tensors) for tensors in optional),
        grad_scale,
        found_inf,
        *betas,
        eps,
        weight_decay,
        l2_penalty,
        skip_untouched,
        clear_grad,
    )


def _on_device(value: Tensor | float, device: torch.device) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((1,), value, dtype=torch.float32, device=device)


_grid_adam_ = declare("grid_adam_")
