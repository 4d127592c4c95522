"""Fields in one kernel, without derivatives: the visible samples of rays, and whole images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.foundation import constants
from voxelfield.ops._packing import UNLIMITED, PackedSamples, check_capacity, empty_samples, parts_of
from voxelfield.ops._table import declare
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.marching import OccupancyBits, midpoints
from voxelfield.ops.render_grid import cells_to_walk
from voxelfield.ops.selection import MIN_WEIGHT


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
    the other, up to rounding: on CUDA, features are summed in float16. There a single kernel computes it, which stops a
    ray once its transmittance falls below ``min_transmittance``: nothing behind a surface is evaluated (early ray
    termination, Levoy 1990), and no buffer stores all the samples in occupied space. Density is
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
    cells = (*cells_to_walk(occupied), aabb_occupancy)
    field = (list(levels), list(blocks), aabb, list(density_weights))
    numbers = (step, density_initial, min_transmittance, min_weight, max_samples_per_ray, list(boxes))
    limit = UNLIMITED if capacity is None else capacity
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
    "pack_slots", lambda origins, capacity: empty_samples(origins, origins.shape[0], capacity), public="march_visible"
)


pyramid_image_fits = declare("pyramid_image_fits")
"""Tells whether a block on the device of ``like`` has room for networks with hidden layers of ``width``."""


# --- whole images: rows, which image backends call by name


def _image(c2w: Tensor, width: int, height: int) -> tuple[Tensor, Tensor, Tensor]:
    return c2w.new_empty(height, width, 3), c2w.new_empty(height, width), c2w.new_empty(height, width)


def _baked_image(c2w: Tensor, width: int, height: int, low: Tensor) -> tuple[Tensor, ...]:
    inputs = height * width, len(low) + (constants.MAX_DEGREE + 1) ** 2
    return *_image(c2w, width, height), c2w.new_empty(inputs, dtype=torch.float16 if c2w.is_cuda else torch.float32)


render_pyramid_image = declare("render_pyramid_image", _image)
r"""Renders the image of a camera without gradient; on CUDA one kernel does everything, including the rays.

The field is that of :class:`voxelfield.VoxelPyramid` and :class:`voxelfield.fields.decoders.FusedMLPDecoder`: features
of all levels side by side, a first network from these to density and geometry, a second one from geometry and the
spherical harmonics of the viewing direction to colour (Mueller et al. 2022, Instant-NGP, section 5.4). The rays are
those of :meth:`voxelfield.rendering.cameras.Cameras.image_rays` through ``aabb``, or through the largest of ``boxes``.

On CUDA every thread of a warp marches a ray, and the warp evaluates the first network for the current samples of its 32
rays at once. A ray ends once its transmittance falls below ``min_transmittance``. The second network is evaluated only
for samples whose weight exceeds ``min_weight``, 32 at a time. If the weights of both networks do not fit the shared
memory of a block, the kernel reads the second network from global memory, which is slower, and the first such call
warns.

Camera and image are as for :data:`render_grid_image`, and the field is as for :func:`march_visible`, with 16 outputs of
``density_weights``. ``color_weights`` are two to four float32 or float16 matrices, from 16 + (degree + 1)^2 inputs to 3
outputs, with hidden layers of at most 128; ``degree`` is 0 to 3.

Returns rgb (height, width, 3) over the background, opacity (height, width) and depth (height, width), the
opacity-weighted mean distance in world units along the ray; float32. Does not synchronise with the device. The image is
the same in every run on a device.
"""

render_grid_image = declare("render_grid_image", _image)
"""Renders the image of a camera in one kernel, rays included, without gradient.

Each pixel is the result of :func:`render_grid` for its ray of :meth:`voxelfield.Cameras.image_rays` through the box of
the grid. Neighbouring threads render neighbouring pixels. :func:`pack_sh_grid` makes ``grid`` and ``density``.

The camera is ``c2w`` (4, 4) float32, camera to world, with axes x right, y up, looking along -z; ``intrinsics`` (4,)
float32, fx, fy, cx, cy in pixels; ``width`` and ``height`` in pixels; and ``lens`` (14,) float32, a row of
:attr:`voxelfield.rendering.lens.Lens.rows`, or None for a pinhole; ``across`` is :attr:`voxelfield.Cameras.across`.
``background`` is (3,) float32, behind the scene. ``occupied`` and ``resolution`` are what :func:`cells_to_walk`
returns, read fastest as empty distances. All else is as for :func:`render_grid`.

Returns as :data:`render_pyramid_image`; the depth is 0 where the opacity is 0.
"""

render_baked_image = declare("render_baked_image", _baked_image)
r"""Sums the values of a baked field along the ray of every pixel of a camera, in one kernel; without gradient.

A sample's density is exp of the interpolated logarithm, and its values are interpolated too. They are averaged with the
rendering weights (Max 1995). Camera, occupied cells, thresholds, ``background`` and ``boxes`` are as for
:data:`render_pyramid_image`; ``aabb_occupancy``, ``aabb`` and ``step`` are in warped coordinates.

The field is an atlas of blocks as in :class:`voxelfield.grids.sparse_grid.SparseGrid`. ``density`` (8 A, 8 B, 8 C)
uint8, ``log_low`` and ``log_step`` are logarithms of densities; ``values`` (M, V / 2) uint8, V = 8 or 16, ``first``
(A B C,) int32, ``side`` (A B C,) uint8 and ``ranges`` (A B C, 2, V) uint8 are values, and ``low`` and ``extent`` (V,)
float32 what these stand for, all as in :class:`voxelfield.rendering.bricks.Bricks`. ``blocks`` (X', Y', Z') int32 is
the table of these blocks, and ``aabb`` (2, 3) float32 the box of their lattice. ``clip`` is (2, 3) float32, a box to
which rays are clipped; None with
``boxes``. ``degree``, 0 to 3, is that of the spherical harmonics.

Returns rgb, opacity and depth as :data:`render_pyramid_image` does, where rgb has the first three of the mean values;
and the inputs of the colour network (height width, V + 16), float16 on CUDA and float32 on the CPU: mean values and the
harmonics of the rays' directions, with zeros above ``degree``. Does not synchronise with the device.
"""

_ROW_BYTES = 16  # the widest read of one thread


@torch.no_grad()
def pack_sh_grid(grid: Tensor, degree: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """Copies a field into the layout that :data:`render_grid_image` reads fastest.

    Args:
        grid: (X, Y, Z, C) floating point, as for :func:`render_grid`.
        degree: Degree of the spherical harmonics, 0 to 3.
        dtype: Type of the stored numbers; float16 halves the memory traffic of float32.

    Returns:
        The features (X, Y, Z, P), padded so that those of a vertex are a whole number of 16-byte reads; and a copy of
        the densities (X, Y, Z). Most samples lie in empty or hidden space and need only their density, and a separate
        array of densities stays in the cache.
    """
    channels = 1 + 3 * (degree + 1) ** 2
    together = _ROW_BYTES // dtype.itemsize
    features = F.pad(grid.detach()[..., :channels].to(dtype), (0, -channels % together)).contiguous()
    return features, features[..., 0].contiguous()
