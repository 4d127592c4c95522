"""Ops of optimizers that visit vertices of grids in place: Adam, total variation, and tiles of vertices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.foundation import constants
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

    The rule is that of Kingma and Ba 2015 (decoupled decay: Loshchilov and Hutter 2019). The kernels read learning
    rates, step numbers and lists of tiles from device memory, so a captured CUDA graph uses the values of these tensors
    at the time of its replay.

    Args:
        params: Grids (X, Y, Z, C) float32, contiguous, all on one device.
        exp_avgs: The first moments, each of its grid's shape, float32 or bfloat16, contiguous.
        exp_avg_sqs: The second moments, of the same shapes and dtypes, contiguous.
        grads: The gradients, of the same shapes, float32, contiguous.
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
        channel_rates: For each grid factors (C,) on the learning rate, float32 on its device, contiguous, or None; that
            they are finite and not negative is not checked.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay, as a fraction of the learning rate.
        l2_penalty: Factor of the parameter that is added to its gradient.
        skip_untouched: Leave a vertex as it is if the gradients of all its channels are exactly zero (the masked Adam
            of DirectVoxGO, Sun et al. 2022, for whole vertices).
        clear_grad: Set the gradients of the updated vertices to zero.
        grad_scale: Factor that all gradients contain and that is divided out: one float32 number on the grids' device,
            as :class:`torch.amp.GradScaler` keeps it. None means 1.
        found_inf: If this is not 0, no step is taken, and ``clear_grad`` clears the gradients of all vertices: one
            float32 number on the grids' device. None means 0.
    """
    if len(params) == 0:
        return
    grids = (list(params), list(exp_avgs), list(exp_avg_sqs), list(grads))
    given = (working, tiles, tile_counts, touched, channel_rates)
    copies, *optional = ([None] * len(params) if x is None else list(x) for x in given)
    numbers = [
        [x if isinstance(x, Tensor) else params[0].new_full((1,), x, dtype=torch.float32) for x in values]
        for values in (lrs, steps)
    ]
    rule = (*betas, eps, weight_decay, l2_penalty, skip_untouched, clear_grad)
    _grid_adam_(*grids, copies, *numbers, *optional, grad_scale, found_inf, *rule)


_grid_adam_ = declare("grid_adam_")


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


def tiles_along(resolution: Sequence[int]) -> tuple[int, int, int]:
    """Returns the number of tiles that cover a grid's vertices along x, y and z; the last may extend past the grid."""
    x, y, z = resolution
    return -(-x // constants.TILE_X), -(-y // constants.TILE_Y), -(-z // constants.TILE_Z)


def active_tiles(
    occupied: Tensor, resolution: Sequence[int], out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Lists the tiles of a grid's vertices that a sample in an occupied cell can read.

    A tile is 4 x 4 x 8 vertices along x, y, z; tile (a, b, c) has the id ``(a << 20) + (b << 10) + c``. A sample reads
    the eight vertices around it. Cells include their faces, so the list is also right for a sample whose position was
    rounded into the neighbouring cell. The call does not synchronise with the device and can be captured in a CUDA
    graph.

    Args:
        occupied: (X, Y, Z) bool, cells that divide the grid's box evenly; any resolution.
        resolution: Numbers of the grid's vertices along x, y, z, the outermost on the box's faces; at most 4096, 4096
            and 8192.
        out: The ids and the count of an earlier call for the same resolution, to be overwritten; None allocates them.

    Returns:
        ids (K,) int32, where K is the number of all tiles, and count (1,) int32, on the device of ``occupied``. The
        first ``count`` ids are the listed tiles, in ascending order; the other ids are undefined.
    """
    if out is None:
        total = math.prod(tiles_along(resolution))
        out = occupied.new_empty(total, dtype=torch.int32), occupied.new_empty(1, dtype=torch.int32)
    ids, count = out
    _active_tiles_(occupied, list(resolution), ids, count)
    return ids, count


def touched_vertices(grad: Tensor, table: Tensor, ids: Tensor | None = None, *, every: bool = False) -> None:
    """Lists the vertices of a grid whose gradient is not zero, by tiles.

    Like the functions that copy these vertices, the call does not synchronise with the device and can be captured in a
    CUDA graph.

    Args:
        grad: (X, Y, Z, C) float32, contiguous.
        table: (K, 5) int32, contiguous, on the device of ``grad``; written to. A row belongs to a tile: a bit for each
            of its 128 vertices in four numbers, and how many bits are set.
        ids: (K,) int32, contiguous: ids of tiles as :func:`active_tiles` lists them; an entry of -1 is unused. None:
            a tile is 128 vertices that follow each other in memory, from the first vertex on.
        every: List all vertices of the tiles, whatever their gradient.
    """
    _touched_vertices_(grad, ids, every, table)


def pack_vertices(grid: Tensor, table: Tensor, packed: Tensor, ids: Tensor | None = None, *, first: int = 0) -> None:
    """Copies listed vertices of a grid into rows, for example to send them.

    Args:
        grid: (X, Y, Z, C) float32, float16 or bfloat16, contiguous.
        table: (K, 5) int32, contiguous, as :func:`touched_vertices` writes it, but the last number of a row is the
            number of vertices in all rows before it.
        packed: (R, C), contiguous, of the dtype and device of ``grid``; receives the listed vertices in their order, as
            far as there are rows.
        ids: As for :func:`touched_vertices`.
        first: Without ``ids``, the index of the vertex with which the first tile begins.
    """
    _pack_vertices_(grid, ids, first, table, packed)


def unpack_vertices(packed: Tensor, table: Tensor, grid: Tensor, ids: Tensor | None = None, *, first: int = 0) -> None:
    """Copies rows back to the listed vertices of a grid, in place; arguments as for :func:`pack_vertices`."""
    _unpack_vertices_(packed, ids, first, table, grid)


_active_tiles_ = declare("active_tiles_", public="active_tiles")
_touched_vertices_ = declare("touched_vertices_", public="touched_vertices")
_pack_vertices_ = declare("pack_vertices_", public="pack_vertices")
_unpack_vertices_ = declare("unpack_vertices_", public="unpack_vertices")
