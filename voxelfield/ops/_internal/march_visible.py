"""Samples along rays at which a pyramid with a density network is visible."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from voxelfield.ops._packing import PackedSamples, check_capacity, empty_samples, parts_of
from voxelfield.ops._table import declare
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.marching import OccupancyBits, midpoints
from voxelfield.ops.render_grid import cells_to_walk
from voxelfield.ops.selection import MIN_WEIGHT

_UNLIMITED = 2**63 - 1


def march_visible(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupied: Tensor | OccupancyBits,
    aabb_occupancy: Tensor,
    levels: Sequence[Tensor],
    aabb: Tensor,
    density_weights: Sequence[Tensor],
    *,
    step: float,
    density_initial: float,
    offset: Tensor | None = None,
    min_transmittance: float = MIN_TRANSMITTANCE,
    min_weight: float = MIN_WEIGHT,
    max_samples_per_ray: int = 64,
    capacity: int | None = None,
    boxes: Sequence[float] = (),
    blocks: Sequence[Tensor | None] = (),
    roulette: float = 0.0,
) -> PackedSamples:
    r"""Marches rays through a pyramid of grids and keeps the samples whose weight exceeds a limit, packed by ray.

    The result is that of :func:`march_rays`, :func:`sample_pyramid`, :func:`mlp` and :func:`select_samples` one after
    the other. On CUDA a single kernel computes it, which stops a ray once its transmittance falls below
    ``min_transmittance``: nothing behind a surface is evaluated (early ray termination, Levoy 1990), and no buffer
    stores all the samples in occupied space. Density is
    :math:`\sigma_0 e^{x_0}` of the network's first output, :math:`x_0 \le 12`
    (:class:`voxelfield.fields.density.ExponentialDensity`). Not differentiable.

    Rays, ``occupied``, ``aabb_occupancy`` and the limits are as for :func:`render_grid`, ``capacity`` as for
    :func:`march_rays`, counting the samples that are kept. Rays behind the first one that does not fit may not be
    marched at all.

    ``levels`` are 1 to 8 grids (X_l, Y_l, Z_l, 4) that fill ``aabb``, outermost vertices on its faces, all of one
    dtype: float16 on CUDA; float32, float16 or bfloat16 on the CPU. A position outside the box reads its nearest point.
    ``blocks`` is empty, or has one entry per level: None for a dense level; otherwise the level is the atlas of a
    sparse grid and the entry is its block table, as for :func:`atlas_coordinates`. ``density_weights`` are the two
    matrices of the network, as for :func:`mlp`: (W, 4 * levels) with W at most 128, and (G, W) with G at most 16;
    float32 or float16. The network runs in the dtype of ``levels``. ``density_initial`` is :math:`\sigma_0`, per world
    unit.

    Of each ray, the nearest ``max_samples_per_ray`` samples are kept. With ``boxes``, as for :func:`march_pieces`, the
    field lies in nested boxes: rays are then in the world frame, and all other arguments and the samples are in warped
    coordinates.

    With a positive ``roulette``, samples whose weight, transmittance times opacity, is below it are kept at random
    (Russian roulette, Arvo and Kirk 1990), with the probability
    ``min(1, opacity * max(transmittance / roulette, 4))``: where light is left, in proportion to their weight. Those
    that are kept become so long that their opacity is divided by this probability. The mean transmittance behind each
    sample therefore stays, and with it the mean of every weight. Which are kept follows from the bits of their
    distances, so it differs between random values of ``offset``.

    Returns:
        The samples that were kept; ``dt`` is ``step`` without a roulette.

    Raises:
        ValueError: ``roulette`` is outside 0..1, or as for :func:`render_grid`.
    """
    offset = midpoints(near) if offset is None else offset
    check_capacity(capacity)
    rays = (origins, directions, near, far, offset)
    cells = (*cells_to_walk(occupied, "origins", origins), aabb_occupancy)
    field = (list(levels), list(blocks), aabb, list(density_weights))
    numbers = (step, density_initial, min_transmittance, min_weight, max_samples_per_ray, list(boxes))
    limit = _UNLIMITED if capacity is None else capacity
    slots, counts, sums, lengths = _march_to_slots(*rays, *cells, *field, *numbers, limit, roulette)
    rows = int(sums.sum()) if capacity is None else capacity
    return PackedSamples(*_pack_slots(*rays, slots, counts, sums, step, list(boxes), rows, lengths))


def _slots(origins: Tensor, max_samples_per_ray: int, roulette: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rays = origins.shape[0]
    return (
        origins.new_empty(rays, max_samples_per_ray),
        origins.new_empty(rays, dtype=torch.int32),
        origins.new_empty(parts_of(rays), dtype=torch.int64),
        origins.new_empty(rays, max_samples_per_ray if roulette > 0 else 0),
    )


_march_to_slots = declare("march_to_slots", _slots, public="march_visible")
_pack_slots = declare(
    "pack_slots",
    lambda origins, capacity: empty_samples(origins, origins.shape[0], capacity),
    public="march_visible",
)
