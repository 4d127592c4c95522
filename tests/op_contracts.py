"""The contracts of the ops: how each public function is called, its plain reference, and what it promises.

``ops/test_contracts.py`` holds every row to all of it, and fails for a function or a raw op that no row reaches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import reference
import torch
from image_ops import render_baked_image, render_grid_image, render_pyramid_image
from op_testing import points_off_faces
from tolerances import arithmetic
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from voxelfield import Lens, _library, ops
from voxelfield.fields.decoders import spherical_harmonics
from voxelfield.ops._internal import optim
from voxelfield.ops._internal.cameras import lens_points, lens_rays, pixel_rays
from voxelfield.ops._internal.color import append_view, pixel_color_error, pixel_colors, sample_color_error
from voxelfield.ops._internal.fields import march_visible
from voxelfield.ops._internal.rays import empty_distance, march_pieces
from voxelfield.ops._internal.stencil import accumulate_trilinear_, atlas_coordinates, sum_duplicates_
from voxelfield.ops._table import TABLE
from voxelfield.warps.nested_boxes import NestedBoxes

BOX = torch.tensor([[-1.0] * 3, [1.0] * 3])
BOXES = NestedBoxes(((-0.5, -0.5, -0.5), (0.5, 0.5, 0.5)), 3).op_arguments
SINGLE, WIDE = (torch.float32,), (torch.float64, torch.float32)
EVERY = (*WIDE, torch.float16, torch.bfloat16)

Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contract:
    """A call of a public function, and what is promised of it.

    Attributes:
        call: The function, of the arguments by name.
        make: Makes arguments for a number of points, samples or rays: on the CPU, float64 where they have ``dtypes``.
        reference: The same in plain float64, or the file whose tests compare values.
        dtypes: Of the arguments; derivatives are compared with differences in the first, if that is float64.
        coordinates: The arguments that are never narrower than float32.
        blamed: The name in errors, if that is not the function's; or a pattern of it.
        in_place: Whether the function writes to its arguments, and is not differentiated.
        constants: The arguments in which the function is not differentiated, though its reference is.
        any_size: Whether a compiler traces it once for all sizes.
        on_cuda: The dtypes on CUDA, if they are others.
    """

    call: Callable[..., Any]
    make: Callable[[int], Arguments]
    reference: Callable[..., Any] | str
    dtypes: Sequence[torch.dtype] = SINGLE
    coordinates: Sequence[str] = ()
    blamed: str = ""
    in_place: bool = False
    constants: Sequence[str] = ()
    any_size: bool = True
    on_cuda: Sequence[torch.dtype] = ()

    def arguments(
        self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, count: int = 8
    ) -> Arguments:
        """Returns arguments on a device, in a dtype of the row."""
        dtype = dtype or (self.on_cuda if self.on_cuda and torch.device(device).type == "cuda" else self.dtypes)[0]

        def place(name: str, x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(place(name, each) for each in x)
            if not isinstance(x, Tensor):
                return x
            wanted = arithmetic(dtype) if name in self.coordinates else dtype
            return x.to(device, wanted if x.dtype == torch.float64 else None)

        return {name: place(name, x) for name, x in self.make(count).items()}

    def results(self, arguments: Arguments) -> list[Tensor]:
        """Calls the function; returns all tensors among its results."""
        return tensors(self.call(**arguments))


def tensors(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def named_tensors(arguments: Arguments) -> dict[str, Tensor]:
    """The tensors among arguments, those in lists as NAME[i]."""
    named = {}
    for name, value in arguments.items():
        several = isinstance(value, (list, tuple))
        named |= {f"{name}[{i}]": x for i, x in enumerate(value)} if several else {name: value}
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def replaced(arguments: Arguments, changes: dict[str, Any]) -> Arguments:
    """The arguments with others in the places of some, named as by :func:`named_tensors`."""
    return {
        name: [changes.get(f"{name}[{i}]", x) for i, x in enumerate(value)]
        if isinstance(value, list)
        else changes.get(name, value)
        for name, value in arguments.items()
    }


def rand(*shape: int) -> Tensor:
    """Numbers between 0.1 and 0.9."""
    return torch.rand(*shape, dtype=torch.float64) * 0.8 + 0.1


def offsets(count: int) -> Tensor:
    """Those of three rays, of which the second has no sample; of many rays for many samples."""
    inner = [3 * count // 8] * 2 if count < 100 else range(7, count - 1, 7)
    return torch.tensor([0, *inner, count])


def rays(count: int) -> Arguments:
    """Rays from two sides through a box; the first two are axis-parallel."""
    inside = 0.8 * torch.rand(count, 3) - 0.4
    directions = F.normalize(torch.rand(count, 3) - 0.4, dim=-1)
    directions[:2] = torch.eye(3)[: min(count, 2)]
    ends = {"near": torch.ones(count), "far": torch.full((count,), 3.0)}
    return {"origins": inside - 2 * directions, "directions": directions, **ends}


def cells() -> Tensor:
    return torch.ones(3, 4, 5, dtype=torch.bool)


def camera() -> Arguments:
    return {"c2w": torch.eye(4), "intrinsics": torch.tensor([4.0, 4.0, 2.0, 2.0]), "lens": torch.zeros(14)}


def of_image(count: int, **others: Any) -> Arguments:
    size = {"width": max(count, 1), "height": 4}
    return {**camera(), **size, **others, "occupied": cells(), "aabb_occupancy": BOX}


def pyramid() -> Arguments:
    levels = [torch.randn(4, 4, 4, 4).half(), torch.randn(5, 5, 5, 4).half()]  # CUDA has no kernel for float32
    return {"levels": levels, "density_weights": [torch.randn(16, 8), torch.randn(16, 16)], "aabb": BOX}


OF_GRID = {"step": 0.1, "density_scale": 5.0, "density_shift": 0.0}
OF_PYRAMID = {"step": 0.1, "density_initial": 1.0}

# --- interpolation


def of_points(count: int, **others: Any) -> Arguments:
    return {**others, "points": points_off_faces(count, "cpu", resolution=(13, 7, 9))}


def by_levels(grids: Sequence[Tensor], points: Tensor, reduce: str = "concat", **options: Any) -> Tensor:
    each = [reference.sample_grid(grid, points, **options) for grid in grids]
    return torch.cat(each, dim=-1) if reduce == "concat" else torch.stack(each).sum(0)


def in_box(grid: Tensor, points: Tensor, aabb: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    unit = (points - aabb[0]) / (aabb[1] - aabb[0])
    return reference.sample_grid(grid, unit, "zeros"), unit


SAMPLING = {
    "sample_trilinear": Contract(
        call=ops.sample_trilinear,
        make=lambda n: of_points(n, grid=rand(2, 2, 2, 8)),
        reference=reference.sample_grid,
    ),
    "sample_trilinear, periodic": Contract(
        call=partial(ops.sample_trilinear, padding="periodic", align_corners=False),
        make=lambda n: of_points(n, grid=rand(3, 2, 3, 2)) | {"points": rand(n, 3) * 3 - 1},
        reference=partial(reference.sample_grid, padding="periodic", align_corners=False),
    ),
    "sample_trilinear, batch": Contract(
        call=ops.sample_trilinear,
        make=lambda n: {"grid": rand(2, 3, 2, 3, 2), "points": of_points(2 * n)["points"].view(2, n, 3)},
        reference=lambda grid, points: torch.stack(list(map(reference.sample_grid, grid, points))),
    ),
    "sample_trilinear, with_gradient": Contract(
        call=partial(ops.sample_trilinear, with_gradient=True, padding="zeros"),
        make=lambda n: of_points(n, grid=rand(3, 2, 3, 2)),
        reference=lambda grid, points: reference.sample_grid_with_gradient(grid, points, "zeros"),
    ),
    "sample_trilinear, batch with_gradient": Contract(
        call=partial(ops.sample_trilinear, with_gradient=True),
        make=lambda n: SAMPLING["sample_trilinear, batch"].make(n) | {"grid": rand(2, 2, 2, 2, 1)},
        reference=lambda grid, points: tuple(
            map(torch.stack, zip(*map(reference.sample_grid_with_gradient, grid, points), strict=True))
        ),
    ),
    "sample_trilinear, nearest": Contract(
        call=partial(ops.sample_trilinear, mode="nearest"),
        make=lambda n: of_points(n, grid=rand(3, 2, 3, 2)),
        reference=partial(reference.sample_grid, mode="nearest"),
    ),
    "sample_pyramid": Contract(
        call=ops.sample_pyramid,
        make=lambda n: of_points(n, grids=[rand(3, 2, 3, 2), rand(2, 3, 2, 3)]),
        reference=by_levels,
    ),
    "sample_pyramid, sum": Contract(
        call=partial(ops.sample_pyramid, reduce="sum", padding="reflection"),
        make=lambda n: of_points(n, grids=[rand(3, 2, 3, 2), rand(2, 3, 2, 2)]),
        reference=partial(by_levels, reduce="sum", padding="reflection"),
    ),
    "grid_sample": Contract(
        call=partial(ops.grid_sample, align_corners=True),
        make=lambda n: {"input": rand(1, 2, 2, 3, 2), "grid": rand(1, n, 1, 2, 3) * 0.9},
        reference=lambda input, grid: (
            F.grid_sample(input, grid, align_corners=True) if grid.numel() else input.new_zeros(1, 2, 0, 1, 2)
        ),
    ),
    "trilinear_interpolate": Contract(
        call=ops.trilinear_interpolate,
        make=lambda n: {"feats": rand(n, 8, 4), "points": rand(n, 3) * 4 - 2},
        reference=reference.interpolate_cells,
    ),
    "sample_trilinear, image with_gradient": Contract(
        call=partial(ops.sample_trilinear, padding="reflection", with_gradient=True),
        make=lambda n: {"grid": rand(3, 4, 2), "points": of_points(n)["points"][:, :2]},
        reference=lambda grid, points: reference.with_slopes(
            lambda p: reference.sample_separable(grid, p, "linear", "reflection"), points
        ),
    ),
    "sample_trilinear, tables": Contract(
        call=partial(ops.sample_trilinear, padding="zeros"),
        make=lambda n: {"grid": rand(2, 5, 3), "points": of_points(2 * n)["points"].view(2, n, 3)[..., :1]},
        reference=lambda grid, points: torch.stack(
            [reference.sample_separable(g, p, "linear", "zeros") for g, p in zip(grid, points, strict=True)]
        ),
    ),
    "sample_cubic": Contract(
        call=ops.sample_cubic,
        make=lambda n: of_points(n, grid=rand(3, 2, 4, 2)),
        reference=lambda grid, points: reference.sample_separable(grid, points, "bspline"),
    ),
    "sample_cubic, images": Contract(
        call=partial(ops.sample_cubic, kernel="convolution", padding="reflection", align_corners=False),
        make=lambda n: {"grid": rand(2, 3, 5, 2), "points": of_points(2 * n)["points"].view(2, n, 3)[..., 1:]},
        reference=lambda grid, points: torch.stack(
            [
                reference.sample_separable(g, p, "convolution", "reflection", False)
                for g, p in zip(grid, points, strict=True)
            ]
        ),
    ),
    "sample_cubic, with_gradient": Contract(
        call=partial(ops.sample_cubic, padding="zeros", with_gradient=True),
        make=lambda n: of_points(n, grid=rand(3, 2, 4, 2)),
        reference=lambda grid, points: reference.with_slopes(
            lambda p: reference.sample_separable(grid, p, "bspline", "zeros"), points
        ),
    ),
    "splat_trilinear": Contract(
        call=partial(ops.splat_trilinear, resolution=(3, 2, 4), padding="periodic"),
        make=lambda n: of_points(n, values=rand(n, 2)),
        reference=lambda values, points: reference.splat_separable(values, points, (3, 2, 4), "linear", "periodic"),
    ),
    "splat_trilinear, weights": Contract(
        call=partial(ops.splat_trilinear, resolution=(4, 3), with_weights=True),
        make=lambda n: {"values": rand(n, 2), "points": of_points(n)["points"][:, :2], "weights": rand(n)},
        reference=lambda values, points, weights: (
            reference.splat_separable(values * weights[:, None], points, (4, 3), "linear"),
            reference.splat_separable(weights[:, None], points, (4, 3), "linear")[..., 0],
        ),
    ),
    "splat_cubic": Contract(
        call=partial(ops.splat_cubic, resolution=(3, 2, 4), padding="reflection"),
        make=lambda n: of_points(n, values=rand(n, 2)),
        reference=lambda values, points: reference.splat_separable(values, points, (3, 2, 4), "bspline", "reflection"),
    ),
    "bspline_prefilter": Contract(
        call=partial(ops.bspline_prefilter, padding="reflection"),
        make=lambda n: {"grid": rand(max(n, 1), 3, 2)},
        reference=lambda grid: reference.bspline_coefficients(grid, 2, "reflection"),
        any_size=False,
    ),
    "grid_sample, image": Contract(
        call=partial(ops.grid_sample, mode="bicubic", padding_mode="border", align_corners=False),
        make=lambda n: {"input": rand(1, 2, 3, 4), "grid": rand(1, n, 1, 2) * 3 - 1.5},
        reference=lambda input, grid: reference.sample_separable(
            input[0].permute(2, 1, 0), grid.flatten(0, 2) / 2 + 0.5, "convolution", "border", False
        ).T.view(1, 2, -1, 1),
    ),
    "sample_in_box": Contract(
        call=lambda grid, points, aabb, padding: TABLE["sample_in_box"](grid, points, aabb, padding),
        make=lambda n: of_points(n, grid=rand(3, 2, 3, 2)) | {"aabb": BOX.double(), "padding": 1},
        reference=in_box,
    ),
}
for name, row in SAMPLING.items():
    options = {"dtypes": EVERY, "coordinates": ("points", "aabb", "grid" if name.startswith("grid_sample") else "")}
    SAMPLING[name] = replace(row, **options, blamed="trilinear sampling|sampling (with_gradient|by)|sample_in_box")

# --- rays of samples


def samples(count: int, *names: str, **others: Any) -> Arguments:
    made = {"density": rand(count) * 4, "rgb": rand(count, 3), "t": rand(count).cumsum(0), "dt": rand(count) * 0.1}
    made |= {"alpha": rand(count), "values": rand(count, 2), "weights": rand(count)}
    return {**{name: made[name] for name in names}, "ray_offsets": offsets(count), **others}


def equal_rays(function: Callable[..., Any], *names: str, **options: Any) -> Contract:
    """The same of two rays of equally many samples, (R, S), whose reference is the function of packed samples."""

    def make(count: int) -> Arguments:
        return {name: x.unflatten(0, (2, count)) for name, x in samples(2 * count, *names).items() if name in names}

    def packed(**x: Tensor) -> list[Tensor]:
        rays, count = x[names[0]].shape
        found = tensors(
            function(
                **{n: v.flatten(0, 1) for n, v in x.items()}, ray_offsets=count * torch.arange(rays + 1), **options
            )
        )
        return [v.view(rays, count) if v.shape == (rays * count,) and v.shape != (rays,) else v for v in found]

    return Contract(call=partial(function, **options), make=make, reference=packed, dtypes=WIDE)


LIMIT = {"min_transmittance": 0.5}
OF_LIGHT = {"ray": ("density", "dt"), "alpha": ("alpha",)}
RAYS = {
    "composite": Contract(
        call=partial(ops.composite, distortion=True, **LIMIT),
        make=lambda n: samples(n, "density", "rgb", "t", "dt"),
        reference=partial(reference.composite, distortion=True, **LIMIT),
        dtypes=EVERY,
    ),
    "composite, one length": Contract(
        call=lambda dt, **x: ops.composite(**x, dt=dt.squeeze(), **LIMIT)[:4],
        make=lambda n: samples(n, "density", "rgb", "t", dt=rand(1)),
        reference=lambda dt, **x: reference.composite(**x, dt=dt[0], **LIMIT),
        dtypes=WIDE,
    ),
    "composite_alphas": Contract(
        call=lambda **x: ops.composite_alphas(**x, **LIMIT)[:4],
        make=lambda n: samples(n, "alpha", "rgb", "t"),
        reference=partial(reference.composite_alphas, **LIMIT),
        dtypes=EVERY,
    ),
    **{
        f"{kind}_{what}": Contract(
            call=partial(getattr(ops, f"{kind}_{what}"), **LIMIT),
            make=lambda n, names=names: samples(n, *names),
            reference=lambda which=which, **x: reference.light(**x, **LIMIT)[which],
            dtypes=EVERY,
        )
        for kind, names in OF_LIGHT.items()
        for which, what in enumerate(("weights", "transmittance"))
    },
    "sum_along_rays": Contract(
        call=ops.sum_along_rays,
        make=lambda n: samples(n, "values", "weights"),
        reference=lambda values, weights, ray_offsets: reference.ray_sums(values * weights[:, None], ray_offsets),
        dtypes=EVERY,
        any_size=False,
    ),
    **{
        f"{kind}_{what}": Contract(
            call=getattr(ops, f"{kind}_{what}"),
            make=lambda n: samples(n, "values"),
            reference=partial(reference.scan, inclusive=kind == "inclusive", product=what == "prod"),
            dtypes=EVERY,
        )
        for kind, what in itertools.product(("inclusive", "exclusive"), ("sum", "prod"))
    },
    "select_samples": Contract(
        call=ops.select_samples,
        make=lambda n: {"positions": rand(n, 3), **samples(n, "density", "t", "dt"), "capacity": n},
        reference=reference.select,
        any_size=False,
    ),
    "importance_sample": Contract(
        call=ops.importance_sample,
        make=lambda n: (
            samples(n, "weights", t_starts=torch.arange(n).double(), offset=rand(len(offsets(n)) - 1))
            | {"t_ends": torch.arange(n) + 0.5 + rand(n) / 2, "count": 3}
        ),
        reference=reference.draw,
        dtypes=WIDE,
    ),
    "composite, equal rays": equal_rays(ops.composite, "density", "rgb", "t", "dt", distortion=True),
    "composite_alphas, equal rays": equal_rays(ops.composite_alphas, "alpha", "rgb", "t"),
    **{
        f"{kind}_{what}, equal rays": equal_rays(getattr(ops, f"{kind}_{what}"), *names)
        for kind, names in OF_LIGHT.items()
        for what in ("weights", "transmittance")
    },
    "offsets_from_ray_index": Contract(
        call=ops.offsets_from_ray_index,
        make=lambda n: {"ray_index": torch.arange(n) // 3, "rays": n},
        reference=lambda ray_index, rays: (ray_index[:, None] < torch.arange(rays + 1)).sum(0),
        any_size=False,
    ),
    "pack_info": Contract(
        call=ops.pack_info,
        make=lambda n: {"ray_index": torch.arange(n) // 3, "rays": n},
        reference=lambda ray_index, rays: torch.stack(
            [(ray_index[:, None] < torch.arange(rays)).sum(0), torch.bincount(ray_index, minlength=rays)], dim=1
        ),
        any_size=False,
    ),
    "ray_index_from_offsets": Contract(
        call=ops.ray_index_from_offsets,
        make=lambda n: {"ray_offsets": offsets(n), "samples": n},
        reference=reference.ray_index_from_offsets,
    ),
}

# --- lines through grids


def lines(count: int, **others: Any) -> Arguments:
    """Rays through the middle of the unit cube; the first two are parallel to an axis, the last one begins inside."""
    origins = 4 * F.normalize(torch.randn(count, 3, dtype=torch.float64)) * rand(count, 1) + 0.5
    directions = (rand(count, 3) * 0.5 + 0.25 - origins) * (1 + rand(count, 1))
    axes = torch.eye(3, dtype=torch.float64)[: min(count, 2)]
    origins[:2] = 0.45 - 2 * axes + 0.1 * axes.flip(1)
    directions[:2] = 1.5 * axes
    origins[-1:] = 0.05
    return {**others, "origins": origins, "directions": directions}


def ball(count: int) -> Arguments:
    """Distances to the middle of the cube, on few vertices, and rays that meet a level of them."""
    axes = [torch.linspace(-0.5, 0.5, size, dtype=torch.float64) for size in (6, 5, 7)]
    vertices = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    arguments = lines(count, grid=vertices.norm(dim=-1, keepdim=True) + 0.02 * torch.randn_like(vertices[..., :1]))
    middle = 0.4 + 0.2 * torch.rand(count, 3, dtype=torch.float64)
    return arguments | {"directions": (middle - arguments["origins"]) * (1 + rand(count, 1))}


def crossing(**arguments: Any) -> Tensor:
    t, hit = ops.first_crossing(**arguments, level=0.21)
    return torch.where(hit, t, 7.0)


LABELS = torch.arange(3 * 4 * 5).view(3, 4, 5) % 4 - 1
LINES = {
    "integrate_rays": Contract(
        call=ops.integrate_rays,
        make=lambda n: lines(n, grid=rand(3, 4, 5, 4)),
        reference=reference.integrate_rays,
    ),
    "integrate_rays, limits": Contract(
        call=ops.integrate_rays,
        make=lambda n: lines(n, grid=rand(3, 1, 5, 3)) | {"near": rand(n) - 0.3, "far": rand(n) * 0.4 + 0.4},
        reference=reference.integrate_rays,
    ),
    "integrate_rays, labels": Contract(
        call=partial(ops.integrate_rays, label_count=3),
        make=lambda n: lines(n, grid=rand(3, 4, 5, 2), labels=LABELS),
        reference=partial(reference.integrate_rays, label_count=3),
    ),
    "integrate_rays, batch": Contract(
        call=ops.integrate_rays,
        make=lambda n: (
            {name: x.unflatten(0, (2, n)) for name, x in lines(2 * n).items()} | {"grid": rand(2, 4, 3, 2, 1)}
        ),
        reference=lambda grid, origins, directions: torch.stack(
            [reference.integrate_rays(*each) for each in zip(grid, origins, directions, strict=True)]
        ),
    ),
    "integrate_rays, image": Contract(
        call=ops.integrate_rays,
        make=lambda n: {name: x.unflatten(0, (2, n)) for name, x in lines(2 * n).items()} | {"grid": rand(3, 4, 5, 1)},
        reference=lambda grid, origins, directions: reference.integrate_rays(
            grid, origins.flatten(0, 1), directions.flatten(0, 1)
        ).view(*origins.shape[:-1], 1),
    ),
    "backproject_rays": Contract(
        call=partial(ops.backproject_rays, resolution=(3, 4, 6), far=0.9),
        make=lambda n: lines(n, values=rand(n, 4)),
        reference=lambda values, origins, directions: reference.backproject_rays(
            values, origins, directions, size=(3, 4, 6), far=0.9 + 0 * values[:, 0].detach()
        ),
    ),
    "first_crossing": Contract(
        call=crossing,
        make=ball,
        reference=partial(reference.first_crossing, level=0.21),
    ),
}
for name, row in LINES.items():
    options = {"dtypes": EVERY, "coordinates": ("origins", "directions", "near", "far")}
    LINES[name] = replace(row, **options, blamed="integrate_rays|backproject_rays|first_crossing|sampling")

# --- distances, and lists of voxels


def around(grid: Tensor, points: Tensor, aabb: Tensor, bound: str) -> Tensor:
    beyond = points - torch.minimum(torch.maximum(points, aabb[0]), aabb[1])
    value = reference.sample_grid(grid, (points - aabb[0]) / (aabb[1] - aabb[0]))
    squared = beyond.square().sum(-1, keepdim=True)
    outside = squared > 0
    distance = torch.where(outside, squared, 1).sqrt() * outside
    if bound == "upper":
        return value + distance
    positive = outside & (value >= 0)
    return torch.where(positive, torch.where(positive, squared + value.square(), 1).sqrt(), value - distance)


def depth_images(count: int, **others: Any) -> Arguments:
    """One image of a slanted surface for each two, from before the box."""
    across = torch.linspace(-0.2, 0.2, 6).double()
    depths = 2 + 0.3 * across[:, None] + 0.2 * across + 0.01 * torch.rand(count // 2, 6, 6, dtype=torch.float64)
    c2w = torch.eye(4, dtype=torch.float64).repeat(count // 2, 1, 1)
    c2w[:, 2, 3] = 2 + 0.1 * torch.rand(count // 2)
    intrinsics = torch.tensor([5.5, 5.6, 3.03, 2.98]).double().repeat(count // 2, 1)
    return {"depths": depths, "c2w": c2w, "intrinsics": intrinsics, "aabb": 0.6 * BOX.double(), **others}


VOXELS = torch.tensor([[0, 0, 0], [1, 1, 1], [2, 1, 0], [6, 3, 1], [7, 3, 2], [8, 2, 3], [3, 3, 3]])
INDICES = {"cpu": ops.VoxelIndex(VOXELS, (9, 4, 5))}


def in_list(features: Tensor, points: Tensor, **options: Any) -> Tensor:
    place = points.device.type if isinstance(points, Tensor) and not points.is_meta else "cpu"
    if place not in INDICES:
        INDICES[place] = ops.VoxelIndex(VOXELS.to(place), (9, 4, 5))
    return ops.sample_voxels(features, INDICES[place], points, **options)


def voxel_grid(features: Tensor) -> Tensor:
    """The same as a dense grid with one more vertex of zeros around."""
    return features.new_zeros(11, 6, 7, features.shape[1]).index_put(tuple((VOXELS + 1).T), features)


def in_voxels(points: Tensor) -> Tensor:
    return (points * points.new_tensor((9, 4, 5)) + 0.5) / points.new_tensor((10, 5, 6))


def renormalized(features: Tensor, points: Tensor) -> Tensor:
    sums = reference.sample_grid(voxel_grid(F.pad(features, (0, 1), value=1.0)), in_voxels(points), "zeros")
    return torch.where(sums[:, -1:] > 0, sums[:, :-1] / torch.where(sums[:, -1:] > 0, sums[:, -1:], 1), 0)


DISTANCES = {
    "sample_distance": Contract(
        call=ops.sample_distance,
        make=lambda n: of_points(n, grid=rand(3, 2, 3, 2)) | {"aabb": BOX.double() + 0.1},
        reference=partial(around, bound="upper"),
        dtypes=EVERY,
        coordinates=("points", "aabb"),
    ),
    "sample_distance, lower with_gradient": Contract(
        call=partial(ops.sample_distance, bound="lower", with_gradient=True),
        make=lambda n: of_points(n, grid=rand(3, 2, 3, 2)) | {"aabb": BOX.double() + 0.1},
        reference=lambda grid, points, aabb: reference.with_slopes(lambda p: around(grid, p, aabb, "lower"), points),
        dtypes=WIDE,
    ),
    "redistance": Contract(
        call=ops.redistance,
        make=lambda n: {"grid": torch.randn(4, 3, max(n, 1), 2).double(), "aabb": BOX.double()},
        reference="tests/ops/test_distances.py",
        dtypes=EVERY,
        coordinates=("aabb",),
        any_size=False,
    ),
    "integrate_depth": Contract(
        call=lambda **x: [y.nan_to_num(0.5) for y in ops.integrate_depth(**x, into=(3, 2, 4), truncation=0.4)],
        make=depth_images,
        reference="tests/ops/test_distances.py",
        dtypes=WIDE,
        any_size=False,
    ),
    "sample_voxels": Contract(
        call=in_list,
        make=lambda n: of_points(n, features=rand(7, 2)),
        reference=lambda features, points: reference.sample_grid(voxel_grid(features), in_voxels(points), "zeros"),
        dtypes=EVERY,
        coordinates=("points",),
    ),
    "sample_voxels, renormalize": Contract(
        call=partial(in_list, missing="renormalize"),
        make=lambda n: of_points(n, features=rand(7, 2)),
        reference=renormalized,
        dtypes=EVERY,
        coordinates=("points",),
    ),
}
for name, row in DISTANCES.items():
    DISTANCES[name] = replace(row, blamed="trilinear sampling|sampling (with_gradient|by)|redistance|trilinear_interp")

# --- networks, colours


def viewed(geometry: Tensor, directions: Tensor, ray_index: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    basis = spherical_harmonics(directions, degree)[ray_index]
    return torch.cat((geometry, basis), dim=1), geometry[:, 0]


def pixels(count: int, **more: Any) -> Arguments:
    return {"rgb": rand(2 * count, 3) * 0.1, "opacity": rand(2 * count), "background": rand(3), **more}


COLORS = {
    "mlp": Contract(
        call=ops.mlp,
        make=lambda n: {"input": rand(n, 5), "weights": [rand(7, 5), rand(3, 7) - 0.5]},
        reference=reference.network,
        dtypes=WIDE,
        on_cuda=(torch.float16,),
    ),
    "append_view": Contract(
        call=append_view,
        make=lambda n: {
            "geometry": rand(n, 5),
            "directions": F.normalize(rand(4, 3)),
            "ray_index": torch.arange(n) % 4,
            "degree": 1,
        },
        reference=viewed,
        dtypes=EVERY,
        coordinates=("directions",),
        constants=("directions",),
    ),
    "pixel_colors": Contract(
        call=pixel_colors,
        make=lambda n: pixels(n, rays_per_pixel=2),
        reference=partial(reference.pixel_colors, pixel_averaging="linear_light"),
        dtypes=WIDE,
    ),
    "pixel_colors, encoded": Contract(
        call=partial(pixel_colors, pixel_averaging="encoded"),
        make=lambda n: pixels(n, rays_per_pixel=2) | {"background": rand(n, 3)},
        reference=partial(reference.pixel_colors, pixel_averaging="encoded"),
        dtypes=WIDE,
    ),
    "pixel_color_error": Contract(
        call=pixel_color_error,
        make=lambda n: {"pixels": rand(n, 3), "truth": rand(n, 3)},
        reference=lambda pixels, truth: (pixels - truth).square().sum() / (3 * max(len(truth), 1)),
        dtypes=WIDE,
        blamed="colou?r.error|errors of colours",
        constants=("truth",),
    ),
    "sample_color_error": Contract(
        call=sample_color_error,
        make=lambda n: {
            "weights": rand(n),
            "sample_rgb": rand(n, 3),
            "ray_index": torch.arange(n) % 8,
            "truth": rand(4, 3),
            "rays_per_pixel": 2,
        },
        reference=lambda weights, sample_rgb, ray_index, truth, rays_per_pixel: (
            (weights[:, None] * (sample_rgb - truth[ray_index // rays_per_pixel]).square()).sum() / 8
        ),
        dtypes=WIDE,
        blamed="colou?r.error|errors of colours",
        any_size=False,
        constants=("weights", "truth"),
    ),
}

COLORS["mlp, count"] = replace(COLORS["mlp"], make=lambda n: COLORS["mlp"].make(n) | {"count": torch.tensor(5)})

# --- space, lenses and images

MARCHED = "tests/ops/test_marching.py"
SPACE = {
    "march_rays": Contract(
        call=ops.march_rays,
        make=lambda n: (
            rays(n) | {"occupied": cells(), "aabb": BOX, "step": 0.1, "offset": torch.full((n,), 0.5), "capacity": 500}
        ),
        reference=MARCHED,
        blamed="march_rays|pack_occupancy",
    ),
    "march_levels": Contract(
        call=ops.march_levels,
        make=lambda n: rays(n) | {"occupied": cells()[None], "aabbs": BOX.view(1, 6), "step": 0.1, "capacity": 500},
        reference="tests/ops/test_importance.py",
    ),
    "march_pieces": Contract(
        call=lambda occupied, **x: march_pieces(**x, occupied=ops.pack_occupancy(occupied), boxes=BOXES),
        make=lambda n: (
            rays(n) | {"aabb": BOX, "occupied": cells(), "step": 0.1, "offset": torch.full((n,), 0.5), "capacity": 500}
        ),
        reference="tests/rendering/test_nested_boxes.py",
        blamed="march_pieces|pack_occupancy|march_rays",
        any_size=False,
    ),
    "march_visible": Contract(
        call=march_visible,
        make=lambda n: (
            rays(n) | {"occupied": cells(), "aabb_occupancy": BOX, **pyramid(), **OF_PYRAMID, "capacity": 500}
        ),
        reference="tests/ops/test_march_visible.py",
        blamed="march_visible|pack_occupancy",
    ),
    "pack_occupancy": Contract(
        call=lambda occupied: ops.pack_occupancy(occupied).words,
        make=lambda n: {"occupied": torch.rand(max(n, 1), 5, 30) < 0.5},
        reference=reference.pack_occupancy,
    ),
    "empty_distance": Contract(
        call=empty_distance,
        make=lambda n: {"occupied": torch.rand(n, 5, 6) < 0.1, "max_distance": 4},
        reference=reference.empty_distance,
    ),
    "lens_rays": Contract(
        call=lens_rays,
        make=lambda n: {"points": rand(n, 2).float(), "lens": torch.zeros(1, 14)},
        reference="tests/ops/test_lens.py",
    ),
    "lens_points": Contract(
        call=lens_points,
        make=lambda n: {"rays": rand(n, 3).float(), "lens": Lens("fisheye", torch.full((1, 4), 0.01)).rows},
        reference="tests/ops/test_lens.py",
    ),
    "pixel_rays": Contract(
        call=pixel_rays,
        make=lambda n: {
            "images": torch.randint(256, (1, 4, 4, 4), dtype=torch.uint8),
            "index": torch.arange(n) % 16,
            **{name: x[None] for name, x in camera().items()},
            "aabb": BOX,
            "supersampling": 2,
        },
        reference="tests/ops/test_pixel_rays.py",
    ),
    "place_in_box": Contract(
        call=lambda points, aabb: TABLE["place_in_box"](points, aabb),
        make=lambda n: {"points": 3 * rand(n, 3) - 1, "aabb": BOX.double()},
        reference=lambda points, aabb: (
            (points - aabb[0]) / (aabb[1] - aabb[0]),
            (points - points.clamp(*aabb)).norm(dim=-1),
        ),
        dtypes=WIDE,
    ),
    "atlas_coordinates": Contract(
        call=atlas_coordinates,
        make=lambda n: {
            "points": torch.rand(n, 3),
            "blocks": torch.arange(8, dtype=torch.int32).view(2, 2, 2) % 2,
            "atlas": (16, 8, 8),
        },
        reference="tests/grids/test_sparse_grid.py",
    ),
    "render_grid": Contract(
        call=ops.render_grid,
        make=lambda n: (
            rays(n)
            | {"occupied": cells(), "aabb_occupancy": BOX, "grid": torch.randn(4, 4, 4, 13).double(), "aabb_grid": BOX}
            | {"offset": torch.full((n,), 0.5), "degree": 1, **OF_GRID}
        ),
        reference="tests/ops/test_render_grid.py",
        dtypes=(torch.float32, torch.float16),
        blamed="render_grid|pack_occupancy|empty_distance",
    ),
    "render_grid_image": Contract(
        call=lambda grid, aabb, **x: render_grid_image(
            **x, grid=grid, density=grid[..., 0].contiguous(), aabb_grid=aabb, degree=0
        ),
        make=lambda n: (
            of_image(n, background=torch.ones(3)) | {"grid": torch.randn(4, 4, 4, 4), "aabb": BOX, **OF_GRID}
        ),
        reference="tests/ops/test_render_grid.py",
        blamed="render_grid_image|pack_occupancy",
        any_size=False,
    ),
    "render_pyramid_image": Contract(
        call=render_pyramid_image,
        make=lambda n: (
            of_image(n, background=torch.ones(3))
            | {
                **pyramid(),
                "color_weights": [torch.ones(8, 17) / 9, torch.ones(3, 8) / 9],
                "degree": 0,
                **OF_PYRAMID,
            }
        ),
        reference="tests/ops/test_render_pyramid.py",
        blamed="render_pyramid_image|pack_occupancy",
        any_size=False,
    ),
    "render_baked_image": Contract(
        call=render_baked_image,
        make=lambda n: (
            of_image(n)
            | {"density": torch.zeros(8, 8, 8, dtype=torch.uint8), "log_low": 0.0, "log_step": 0.1}
            | {"values": torch.zeros(512, 4, dtype=torch.uint8), "first": torch.zeros(1, dtype=torch.int32)}
            | {"side": torch.full((1,), 8, dtype=torch.uint8), "ranges": torch.zeros(1, 2, 8, dtype=torch.uint8)}
            | {"low": torch.zeros(8), "extent": torch.ones(8), "background": torch.ones(3), "degree": 0}
            | {"blocks": torch.zeros(1, 1, 1, dtype=torch.int32), "aabb": BOX, "clip": BOX, "step": 0.1}
        ),
        reference="tests/rendering/test_baked.py",
        blamed="render_baked_image|pack_occupancy",
        any_size=False,
    ),
}

SPACE["march_visible, roulette"] = replace(
    SPACE["march_visible"], make=lambda n: SPACE["march_visible"].make(n) | {"roulette": 0.5}
)
for name in ("march_visible", "render_pyramid_image"):
    SPACE[f"{name}, pieces"] = replace(SPACE[name], call=partial(SPACE[name].call, boxes=BOXES), any_size=False)
SPACE["render_grid, distances"] = replace(
    SPACE["render_grid"],
    call=lambda occupied, **x: ops.render_grid(**x, occupied=empty_distance(occupied), min_weight=1e-3),
    any_size=False,
)
SPACE["pixel_rays, no lens"] = replace(
    SPACE["pixel_rays"], make=lambda n: {**SPACE["pixel_rays"].make(n), "lens": None, "supersampling": 1}
)

# --- what is written in place


def on_copies(function: Callable[..., None], *written: str) -> Callable[..., Any]:
    """Calls a function on copies of what it writes, and returns them."""

    def call(**arguments: Any) -> Any:
        copies = {name: tree_map_only(Tensor, torch.clone, arguments[name]) for name in written}
        function(**arguments | copies)
        return list(copies.values())

    return call


def accumulated(sums: list[Tensor], values: Tensor, points: Tensor) -> list[Tensor]:
    grids = [torch.zeros_like(x, requires_grad=True) for x in sums]
    gradients = torch.autograd.grad(by_levels(grids, points), grids, values)
    return [x + gradient for x, gradient in zip(sums, gradients, strict=True)]


# The table of all vertices of a grid of one tile.
TABLE_OF_ONE_TILE = torch.tensor([[-1, -1, -1, -1, 0]], dtype=torch.int32)


def of_grid(count: int, **others: Any) -> Arguments:
    return {"grid": torch.randn(4, 4, 8, count), **others}


UPDATED = ("params", "exp_avgs", "exp_avg_sqs")
IN_PLACE = {
    "accumulate_trilinear_": Contract(
        call=on_copies(accumulate_trilinear_, "sums"),
        make=lambda n: of_points(n, sums=[rand(3, 2, 3, 2), rand(2, 3, 2, 3)], values=rand(n, 5)),
        reference=accumulated,
        dtypes=EVERY,
        coordinates=("sums", "points"),
    ),
    "grid_adam_": Contract(
        call=on_copies(optim.grid_adam_, *UPDATED, "working"),
        make=lambda n: (
            {name: [torch.rand(n, 3, 4, 2)] for name in (*UPDATED, "grads")}
            | {"lrs": [0.1], "steps": [1], "working": [torch.zeros(n, 3, 4, 2).half()]}
        ),
        reference="tests/grids/test_adam.py",
    ),
    "grid_total_variation_grad_": Contract(
        call=on_copies(optim.grid_total_variation_grad_, "grad"),
        make=lambda n: {"grad": torch.rand(n, 3, 4, 2), "param": torch.rand(n, 3, 4, 2), "weights": torch.ones(3)},
        reference="tests/grids/test_every_grid.py",
    ),
    "sum_duplicates_": Contract(
        call=on_copies(sum_duplicates_, "sums"),
        make=lambda n: {
            "sums": torch.randn(8, 8, 8, n),
            "copies": torch.tensor([3, 9, 2, 11], dtype=torch.int32),
            "begins": torch.tensor([0, 2, 4], dtype=torch.int32),
        },
        reference="tests/grids/test_sparse_grid.py",
    ),
    "touched_vertices": Contract(
        call=on_copies(optim.touched_vertices, "table"),
        make=lambda n: {"grad": torch.randn(4, 4, 8, n), "table": torch.zeros(1, 5, dtype=torch.int32)},
        reference="tests/ops/test_tiles.py",
    ),
    "pack_vertices": Contract(
        call=on_copies(optim.pack_vertices, "packed"),
        make=lambda n: of_grid(n, table=TABLE_OF_ONE_TILE, packed=torch.zeros(128, n)),
        reference=lambda grid, table, packed: grid.flatten(0, 2),
    ),
    "unpack_vertices": Contract(
        call=on_copies(optim.unpack_vertices, "grid"),
        make=lambda n: of_grid(n, table=TABLE_OF_ONE_TILE, packed=torch.rand(128, n)),
        reference=lambda grid, table, packed: packed.view(grid.shape),
    ),
    "active_tiles": Contract(
        call=optim.active_tiles,
        make=lambda n: {"occupied": torch.ones(max(n, 1), 3, 3, dtype=torch.bool), "resolution": (5, 6, 9)},
        reference="tests/grids/test_adam.py",
    ),
}
IN_PLACE["accumulate_trilinear_, slabs"] = replace(
    IN_PLACE["accumulate_trilinear_"],
    call=on_copies(partial(accumulate_trilinear_, slabs=[(1, 9), (0, 4)]), "sums"),
    reference="tests/ops/test_accumulate.py",
)
TILES = {"tiles": torch.tensor([0, -1], dtype=torch.int32), "tile_count": torch.ones(1, dtype=torch.int32)}
IN_PLACE["grid_total_variation_grad_, tiles"] = replace(
    IN_PLACE["grid_total_variation_grad_"],
    make=lambda n: IN_PLACE["grid_total_variation_grad_"].make(n) | TILES,
)
IN_PLACE["grid_adam_, tiles and rates"] = replace(
    IN_PLACE["grid_adam_"],
    make=lambda n: (
        IN_PLACE["grid_adam_"].make(n)
        | {"tiles": [TILES["tiles"]], "tile_counts": [TILES["tile_count"]], "channel_rates": [torch.ones(2)]}
    ),
)
IN_PLACE = {name: replace(row, in_place=True) for name, row in IN_PLACE.items()}

CONTRACTS: dict[str, Contract] = {**SAMPLING, **RAYS, **LINES, **DISTANCES, **COLORS, **SPACE, **IN_PLACE}

# --- the raw ops that the functions call


class _Calls(TorchDispatchMode):
    """Records the calls of raw ops, with copies of their arguments, before they are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "voxelfield":
            copies = tree_map_only(Tensor, lambda x: x.detach().clone(), args)
            self.found.append((func._schema.name.removeprefix("voxelfield::"), copies))
        return func(*args, **(kwargs or {}))


def raw_calls(device: torch.device, name: str, count: int = 8) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every call of a raw op in a row of the table, and in its first and second derivatives: names and arguments."""
    _library.ensure_loaded(device.type)
    row = CONTRACTS[name]
    arguments = row.arguments(device, count=count)
    arguments.pop("capacity", None)  # the rows that are not needed hold NaN, which opcheck compares
    with _Calls() as calls:
        row.results(arguments)
        named = named_tensors({} if row.in_place else arguments)
        leaves = [x.requires_grad_() for x in named.values() if x.is_floating_point()]
        for twice in (False, True):
            if not (results := [x.double().square().sum() for x in row.results(arguments) if x.requires_grad]):
                break
            first = torch.autograd.grad(sum(results), leaves, create_graph=twice, allow_unused=True)
            slopes = [x.double().square().sum() for x in first if x is not None and x.requires_grad]
            # What is refused is checked in test_contracts.py.
            with suppress(NotImplementedError):
                torch.autograd.grad(sum(slopes), leaves, allow_unused=True) if slopes else ()
    yield from calls.found


@cache
def _one_call_of_each(device: torch.device) -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)
    found: dict[str, tuple[Any, ...]] = {"pyramid_image_fits": (torch.zeros(1, device=device), 64)}
    for row in CONTRACTS:
        for name, arguments in raw_calls(device, row):
            found.setdefault(name, arguments)
    return found


def one_call_of_each(device: torch.device) -> dict[str, tuple[Any, ...]]:
    """Arguments of one call of every raw op, which may be written to."""
    return tree_map_only(Tensor, torch.clone, _one_call_of_each(device))
