"""The ops that interpolate: grids, pyramids, volumes in torch's layout, and cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import reference
import torch
from fuzz_property import Subject, by_row, doubles, tensors_of
from fuzz_values import FLOATS, NOT_FINITE, all_placed, devices, numbers, seeds
from hypothesis import strategies as st
from op_testing import LOOKUPS, TORCH_LOOKUPS
from tolerances import arithmetic
from torch import Tensor
from torch.nn import functional as F

from voxelfield import ops

_SIZES = st.sampled_from([1, 2, 3, 5, 8, 17])
_CHANNELS = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 12, 33])
_COUNTS = st.sampled_from([0, 1, 2, 7, 33])


@st.composite
def positions(draw: st.DrawFn, lead: tuple[int, ...], sizes: list[int], align_corners: bool, linear: bool) -> Tensor:
    """Positions about a grid, some of them not finite; not where the slightest error makes another value.

    That is half-way between two vertices for the nearest one, and, for derivatives, at the faces of cells.
    """
    generator = torch.Generator().manual_seed(draw(seeds))
    resolution = torch.tensor(sizes, dtype=torch.float64)
    last = (resolution - 1).clamp(min=1)
    far = draw(st.sampled_from([0, 2, 2, 30]))

    def even() -> Tensor:
        return torch.rand(*lead, 3, generator=generator, dtype=torch.float64)

    u = (even() * (last + 2 * far) - far).floor() + 0.1 + 0.3 * even() + 0.5 * (even() < 0.5)
    points = u / last if align_corners else (u + 0.5) / resolution
    if points.numel():
        for _ in range(draw(st.integers(0, 3))):
            points.view(-1)[draw(st.integers(0, points.numel() - 1))] = draw(st.sampled_from(NOT_FINITE))
    return points


@st.composite
def _grid_arguments(draw: st.DrawFn, levels: int) -> dict[str, Any]:
    device, dtype = draw(devices), draw(st.sampled_from(FLOATS))
    padding, align_corners, mode = draw(st.sampled_from(LOOKUPS))
    batch = draw(st.sampled_from([(), (), (1,), (2,)]))
    options: dict[str, Any] = {"padding": padding, "align_corners": align_corners, "mode": mode}
    options["with_gradient"] = mode == "linear" and draw(st.booleans())
    count = 1 if levels == 1 else draw(st.sampled_from([1, 2, 3, 5, 16]))
    add = levels > 1 and draw(st.booleans())
    channels, grids = draw(_CHANNELS), []
    # A coordinate must lie off the faces of every level's cells: levels of a pyramid are of one size here.
    sizes = [draw(_SIZES) for _ in range(3)]
    for _ in range(count):
        shape = (*batch, *sizes, channels if add or levels == 1 else draw(_CHANNELS))
        grids.append(draw(numbers(shape, dtype)))
    points = draw(positions((*batch, draw(_COUNTS)), sizes, align_corners, mode == "linear"))
    points = points.to(arithmetic(dtype))
    if levels == 1:
        return draw(all_placed({"grid": grids[0], "points": points, **options}, device))
    options["reduce"] = "sum" if add else "concat"
    return draw(all_placed({"grids": grids, "points": points, **options}, device))


def _sample(
    grid: Tensor, points: Tensor, padding: str, align_corners: bool, mode: str, with_gradient: bool
) -> tuple[Tensor, ...]:
    sample: Any = reference.sample_grid_with_gradient if with_gradient else reference.sample_grid
    options = padding, align_corners, mode
    if grid.dim() == 4:  # and points are (..., 3)
        assert points.shape[-1] == 3
        sampled = sample(grid.double(), points.reshape(-1, 3), *options)
        return tuple(x.reshape(*points.shape[:-1], *x.shape[1:]) for x in (sampled if with_gradient else (sampled,)))
    each = [_sample(one, where, *options, with_gradient) for one, where in zip(grid, points, strict=True)]
    return tuple(map(torch.stack, zip(*each, strict=True)))


def _sample_levels(grids: list[Tensor], points: Tensor, reduce: str, **options: Any) -> tuple[Tensor, ...]:
    each = list(zip(*(_sample(grid, points, **options) for grid in grids), strict=True))
    if reduce == "sum":
        return tuple(torch.stack(level).sum(0) for level in each)
    return tuple(torch.cat(level, dim) for level, dim in zip(each, (-1, -2), strict=False))


def _diverged_shows(arguments: dict[str, Any], result: tuple[Tensor, ...]) -> None:
    """What a feature that is not finite touches is not finite; all else is as if that feature were zero."""
    dtype = tensors_of(arguments, ("grid", "grids"))[0].dtype
    arguments = doubles(arguments)
    options = {name: value for name, value in arguments.items() if name not in ("grid", "grids", "points")}
    grids = arguments.get("grids", [arguments.get("grid")])
    points = arguments["points"]
    if any(not bool((x.abs() < 1e4)[x.isfinite()].all()) for x in (*grids, points)):
        assert all(x.dtype == dtype for x in result)
        return
    bad = [(~x.isfinite()).double() for x in grids]
    clean = [torch.where(x.isfinite(), x, 0.0) for x in grids]
    call: Any = (
        _sample_levels if "grids" in arguments else lambda grids, points, **rest: _sample(*grids, points, **rest)
    )
    touched, expected = call(bad, points, **options), call(clean, points, **options)
    value, weight = result[0].detach().cpu().double(), touched[0]
    assert not bool(value[weight > 0].isfinite().any()), "a feature that is not finite reads as if it were"
    calm = value.isfinite() & (weight == 0)
    largest = max((float(x.abs().max()) for x in clean if x.numel()), default=1.0)
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    assert bool(((value - expected[0]).abs()[calm] <= 64 * eps * max(largest, 1.0) * len(grids)).all())


@st.composite
def _volume_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, dtype = draw(devices), draw(st.sampled_from(FLOATS))
    padding, align_corners, mode = draw(st.sampled_from(TORCH_LOOKUPS))
    count, sizes = draw(st.sampled_from([0, 1, 2])), [draw(_SIZES) for _ in range(3)]
    volume = draw(numbers((count, draw(_CHANNELS), *sizes[::-1]), dtype))
    out = [draw(st.sampled_from([0, 1, 2, 4])) for _ in range(3)]
    # Not finite reads zeros here, and with F.grid_sample what the padding says: it is left out.
    where = (
        draw(positions((count, *out), sizes, align_corners, mode == "linear")).nan_to_num(0.137, 0.137, 0.137) * 2 - 1
    )
    arguments = {"input": volume, "grid": where.to(arithmetic(dtype)), "padding_mode": padding}
    arguments |= {"align_corners": align_corners, "mode": "bilinear" if mode == "linear" else mode}
    return draw(all_placed(arguments, device))


def _volume_reference(input: Tensor, grid: Tensor, **options: Any) -> Tensor:
    if input.numel() == 0 or grid.numel() == 0:  # torch refuses what is empty
        assert input.shape[0] == grid.shape[0]
        return (input.sum() + grid.sum()).mul(0) + input.new_zeros(*input.shape[:2], *grid.shape[1:4])
    return F.grid_sample(input, grid, **options)


@st.composite
def _cell_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, dtype, count = draw(devices), draw(st.sampled_from(FLOATS)), draw(_COUNTS)
    feats = draw(numbers((count, 8, draw(_CHANNELS)), dtype))
    points = draw(numbers((count, 3), arithmetic(dtype), -1.5, 1.5))
    return draw(all_placed({"feats": feats, "points": points}, device))


_CUBIC = ["bspline", "convolution"]


def _options(draw: st.DrawFn) -> dict[str, Any]:
    padding, align_corners, _ = draw(st.sampled_from(LOOKUPS))
    return {"padding": padding, "align_corners": align_corners}


@st.composite
def _cubic_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, dtype, options = draw(devices), draw(st.sampled_from(FLOATS)), _options(draw)
    batch, axes = draw(st.sampled_from([(), (), (2,)])), draw(st.integers(1, 3))
    sizes = [draw(_SIZES) for _ in range(3)]
    grid = draw(numbers((*batch, *sizes[:axes], draw(_CHANNELS)), dtype))
    points = draw(positions((*batch, draw(_COUNTS)), sizes, options["align_corners"], True))[..., :axes]
    options |= {"kernel": draw(st.sampled_from(_CUBIC)), "with_gradient": draw(st.booleans())}
    return draw(all_placed({"grid": grid, "points": points.to(arithmetic(dtype)), **options}, device))


def _cubic_reference(
    grid: Tensor, points: Tensor, kernel: str, padding: str, align_corners: bool, with_gradient: bool
) -> Any:
    options = kernel, padding, align_corners
    if grid.dim() == points.shape[-1] + 2:
        each = [_cubic_reference(one, where, *options, with_gradient) for one, where in zip(grid, points, strict=True)]
        return tuple(map(torch.stack, zip(*each, strict=True))) if with_gradient else torch.stack(each)
    assert grid.dim() == points.shape[-1] + 1
    rows = points.reshape(-1, points.shape[-1])

    def sample(rows: Tensor) -> Tensor:
        return reference.sample_separable(grid.double(), rows, *options)

    if not with_gradient:
        return sample(rows).reshape(*points.shape[:-1], grid.shape[-1])
    return tuple(x.reshape(*points.shape[:-1], *x.shape[1:]) for x in reference.with_slopes(sample, rows))


@st.composite
def _splat_arguments(draw: st.DrawFn, kernels: list[str]) -> dict[str, Any]:
    device, dtype, options = draw(devices), draw(st.sampled_from(FLOATS)), _options(draw)
    axes, count = draw(st.integers(1, 3)), draw(_COUNTS)
    sizes, kernel = [draw(_SIZES) for _ in range(3)], draw(st.sampled_from(kernels))
    points = draw(positions((count,), sizes, options["align_corners"], kernel != "nearest"))[..., :axes]
    options |= {"resolution": sizes[:axes], "with_weights": draw(st.booleans())}
    options["kernel" if kernel in _CUBIC else "mode"] = kernel
    values, weights = draw(numbers((count, draw(_CHANNELS)), dtype)), draw(numbers((count,), arithmetic(dtype)))
    given = {"values": values, "points": points.to(arithmetic(dtype)), "weights": weights}
    return draw(all_placed({**given, **options}, device))


def _splat_reference(
    values: Tensor, points: Tensor, weights: Tensor, resolution: list[int], with_weights: bool, **options: Any
) -> Any:
    kernel = options.get("kernel") or options["mode"]
    lookup = kernel, options["padding"], options["align_corners"]
    columns = torch.cat((values * weights[:, None], weights[:, None]), 1)
    total = reference.splat_separable(columns, points, resolution, *lookup)
    return (total[..., :-1], total[..., -1]) if with_weights else total[..., :-1]


@st.composite
def _coefficient_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, dtype, axes = draw(devices), draw(st.sampled_from(FLOATS)), draw(st.integers(1, 3))
    shape = [draw(_SIZES) for _ in range(axes)]
    grid = draw(numbers((*draw(st.sampled_from([(), (2,), (0,)])), *shape, draw(_CHANNELS)), dtype))
    return draw(all_placed({"grid": grid, "dimensions": axes, **_options(draw)}, device))


@st.composite
def _line_arguments(draw: st.DrawFn, adjoint: bool = False) -> dict[str, Any]:
    """Rays through the inner half of the cube, or past it."""
    device, dtype, count = draw(devices), draw(st.sampled_from(FLOATS)), draw(st.sampled_from([0, 1, 2, 7]))
    batch, labelled = draw(st.sampled_from([(), (), (2,)])), draw(st.booleans())
    sizes, channels, wide = [draw(_SIZES) for _ in range(3)], draw(_CHANNELS), arithmetic(dtype)
    origins = draw(numbers((*batch, count, 3), wide, -1.0, 2.0))
    through = draw(numbers((*batch, count, 3), wide, 0.25, draw(st.sampled_from([0.75, 3.0]))))
    arguments = {"origins": origins, "directions": (through - origins) * draw(st.sampled_from([1.0, 0.01, 300.0]))}
    for name in ("near", "far"):
        if draw(st.booleans()):
            arguments[name] = draw(numbers((count,), wide, -0.5, 1.5))
    if labelled:
        arguments["labels"] = (draw(numbers((*sizes,), torch.float64, -1.0, 4.0))).floor().int()
    if adjoint:
        values = draw(numbers((*batch, count, *([3] if labelled else []), channels), dtype))
        arguments |= {"values": values, "resolution": sizes, "batched": bool(batch)}
    else:
        arguments |= {"grid": draw(numbers((*batch, *sizes, channels), dtype))}
        arguments |= {"label_count": 3} if labelled else {}
    return draw(all_placed(arguments, device))


def _rows(lead: Sequence[int], batched: bool, **rays: Any) -> Iterator[dict[str, Tensor]]:
    """The rays of each grid of a batch, or of one grid, broadcast to the shape of all and laid side by side."""
    wide = ("origins", "directions")
    given = {name: x for name, x in rays.items() if x is not None}
    rows = {name: x.expand(*lead, *([3] if name in wide else [])) for name, x in given.items()}
    for i in range(lead[0]) if batched else [slice(None)]:
        yield {name: x[i].reshape(-1, 3) if name in wide else x[i].reshape(-1) for name, x in rows.items()}


def _integrals(
    grid: Tensor,
    origins: Tensor,
    directions: Tensor,
    near: Tensor | None = None,
    far: Tensor | None = None,
    **labels: Any,
) -> Tensor:
    lead, batched = torch.broadcast_shapes(origins.shape, directions.shape)[:-1], grid.dim() == 5
    rows = _rows(lead, batched, origins=origins, directions=directions, near=near, far=far)
    each = [reference.integrate_rays(one, **x, **labels) for one, x in zip(grid if batched else [grid], rows)]  # noqa: B905
    last = ([labels["label_count"]] if labels.get("labels") is not None else []) + [grid.shape[-1]]
    return torch.cat([grid.new_zeros(0, *last), *each]).reshape(*lead, *last)


def _backprojected(
    values: Tensor, resolution: Any, batched: bool, labels: Tensor | None = None, **rays: Tensor
) -> Tensor:
    lead = values.shape[: -1 if labels is None else -2]
    size = [resolution] * 3 if isinstance(resolution, int) else resolution
    options = {} if labels is None else {"labels": labels, "label_count": values.shape[-2]}
    each = [
        reference.backproject_rays(
            one.reshape(len(x["origins"]), *values.shape[len(lead) :]), **x, size=size, **options
        )
        for one, x in zip(values if batched else [values], _rows(lead, batched, **rays))  # noqa: B905
    ]
    total = torch.stack(each) if each else values.new_zeros(0, *size, values.shape[-1])
    return total if batched else total[0]


@st.composite
def _surface_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """A plane through the cube, and rays that go more or less across it."""
    device, dtype, sizes = draw(devices), draw(st.sampled_from([torch.float32, torch.float64])), draw(st.integers(2, 9))
    axes = torch.linspace(0, 1, sizes, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(axes, axes, axes, indexing="ij"), dim=-1)
    normal = torch.tensor([1.0, 0.3, -0.4], dtype=torch.float64) * draw(st.sampled_from([1.0, -1.0, 10.0]))
    count = draw(_COUNTS)
    origins = draw(numbers((count, 3), torch.float64, 0.3, 0.7)) - 1.1 * torch.tensor([1.0, 0.0, 0.0]).double()
    directions = torch.tensor([1.0, 0.0, 0.0]) + draw(numbers((count, 3), torch.float64, -0.2, 0.2))
    grid = ((points - 0.5) * normal).sum(-1, keepdim=True)
    arguments = {"grid": grid.to(dtype), "origins": origins.to(dtype), "directions": directions.to(dtype)}
    return draw(all_placed(arguments | {"level": draw(st.sampled_from([0.0, 0.05]))}, device))


def _crossings(grid: Tensor, origins: Tensor, directions: Tensor, level: float) -> tuple[Tensor, Tensor]:
    origins, directions = torch.broadcast_tensors(origins, directions)
    t = reference.first_crossing(grid, origins.reshape(-1, 3), directions.reshape(-1, 3), level)
    t = t.reshape(origins.shape[:-1])
    return torch.where(t < 7, t, torch.inf), t < 7


SAMPLING = {
    "integrate_rays": by_row(
        ops.integrate_rays, _line_arguments(), _integrals, ("origins", "directions"), trained=("grid",)
    ),
    "backproject_rays": Subject(ops.backproject_rays, _line_arguments(True), _backprojected, trained=("values",)),
    "first_crossing": by_row(ops.first_crossing, _surface_arguments(), _crossings, ("origins", "directions")),
    "sample_cubic": by_row(
        ops.sample_cubic, _cubic_arguments(), _cubic_reference, ("points",), trained=("grid", "points")
    ),
    "splat_trilinear": Subject(
        ops.splat_trilinear,
        _splat_arguments(["linear", "nearest"]),
        _splat_reference,
        trained=("values", "points", "weights"),
    ),
    "splat_cubic": Subject(
        ops.splat_cubic, _splat_arguments(_CUBIC), _splat_reference, trained=("values", "points", "weights")
    ),
    "bspline_prefilter": Subject(
        ops.bspline_prefilter,
        _coefficient_arguments(),
        lambda dimensions, **more: reference.bspline_coefficients(axes=dimensions, **more),
        trained=("grid",),
    ),
    "sample_trilinear": Subject(
        ops.sample_trilinear,
        _grid_arguments(1),
        _sample,
        trained=("grid", "points"),
        check_extreme=_diverged_shows,
        extreme=("grid",),
    ),
    "sample_pyramid": Subject(
        ops.sample_pyramid,
        _grid_arguments(2),
        _sample_levels,
        trained=("grids", "points"),
        check_extreme=_diverged_shows,
        extreme=("grids",),
    ),
    "grid_sample": by_row(
        ops.grid_sample, _volume_arguments(), _volume_reference, ("input", "grid"), trained=("input", "grid")
    ),
    "trilinear_interpolate": by_row(
        ops.trilinear_interpolate,
        _cell_arguments(),
        reference.interpolate_cells,
        ("feats", "points"),
        trained=("feats", "points"),
    ),
}
