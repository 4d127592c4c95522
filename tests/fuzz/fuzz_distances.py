"""The ops of signed distances, and the one that samples a list of voxels."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import op_contracts
import pytest
import reference
import torch
from fuzz_property import Subject, assert_all_match
from fuzz_sampling import positions
from fuzz_values import FLOATS, all_placed, devices, numbers, others_unchanged, seeds
from hypothesis import strategies as st
from tolerances import arithmetic, assert_matches
from torch import Tensor

from voxelfield import ops

_SIZES = st.sampled_from([1, 2, 3, 5, 8])
_WIDE = st.sampled_from([torch.float32, torch.float64])


@st.composite
def _boxes(draw: st.DrawFn) -> Tensor:
    middle, half = draw(numbers((3,), torch.float64)), draw(numbers((3,), torch.float64, 0.3, 2.0))
    return torch.stack((middle - half, middle + half))


def _is_flat(aabb: Tensor) -> bool:
    return not bool(((aabb[1] - aabb[0]).double().abs() > 1e-2).all())


@st.composite
def _distance_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, bound = draw(devices), draw(st.sampled_from(["upper", "lower"]))
    # A distance of 16 bits, rounded before it is squared, is too coarse for a comparison.
    dtype = draw(st.sampled_from(FLOATS) if bound == "upper" else _WIDE)
    batch, sizes = draw(st.sampled_from([(), (), (2,)])), [draw(_SIZES) for _ in range(3)]
    grid, aabb = draw(numbers((*batch, *sizes, draw(st.sampled_from([0, 1, 2, 5]))), dtype)), draw(_boxes())
    where = draw(positions((*batch, draw(st.sampled_from([0, 1, 7, 33]))), sizes, True, True))
    points, wide = aabb[0] + where * (aabb[1] - aabb[0]), arithmetic(dtype)
    arguments = {"grid": grid, "points": points.to(wide), "aabb": aabb.to(wide), "bound": bound}
    return draw(all_placed(arguments | {"with_gradient": draw(st.booleans())}, device))


def _bounds(grid: Tensor, points: Tensor, aabb: Tensor, bound: str, with_gradient: bool) -> Any:
    if grid.dim() == 5:
        each = [_bounds(one, where, aabb, bound, with_gradient) for one, where in zip(grid, points, strict=True)]
        return tuple(map(torch.stack, zip(*each, strict=True))) if with_gradient else torch.stack(each)
    finite = points.isfinite().all(dim=-1, keepdim=True).reshape(-1, 1)
    rows = torch.where(finite, points.reshape(-1, 3), aabb[0].detach())

    def sample(rows: Tensor) -> Tensor:
        return torch.where(finite, op_contracts.around(grid, rows, aabb, bound), 0.0)

    if not with_gradient:
        return sample(rows).reshape(*points.shape[:-1], -1 if points.numel() else grid.shape[-1])
    return tuple(x.reshape(*points.shape[:-1], *x.shape[1:]) for x in reference.with_slopes(sample, rows))


def _same_bounds(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    if _is_flat(arguments["aabb"]):
        return
    if actual[0].dtype in (torch.float32, torch.float64):
        assert_all_match(arguments, actual, expected)
        return
    for a, e in zip(actual, expected, strict=True):  # the grid's value is rounded before the distance is added
        eps = 2 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a.detach().cpu().double(), e.detach(), rtol=eps, atol=eps)


@st.composite
def _grid_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, dtype, batch = draw(devices), draw(st.sampled_from(FLOATS)), draw(st.sampled_from([(), (), (2,), (0,)]))
    grid = draw(numbers((*batch, *(draw(_SIZES) for _ in range(3)), draw(st.sampled_from([0, 1, 2]))), dtype))
    grid = grid + draw(st.sampled_from([0.0, 0.0, 0.8, -2.0]))  # few crossings, or none
    return draw(all_placed({"grid": grid, "aabb": draw(_boxes()).to(arithmetic(dtype))}, device))


def _edge_crossings(values: Tensor) -> Tensor:
    """Where values (X, Y, Z), linear along edges, change their sign: (K, 3) in steps."""
    found = []
    for axis in range(3):
        first, second = (
            values.narrow(axis, 0, values.shape[axis] - 1),
            values[(slice(None),) * axis + (slice(1, None),)],
        )
        index = ((first < 0) != (second < 0)).nonzero()
        a, b = (x[tuple(index.T)] for x in (first, second))
        found.append(index + (a / (a - b))[:, None] * torch.eye(3, dtype=torch.float64)[axis])
    return torch.cat(found)


def _redistanced(grid: Tensor, aabb: Tensor) -> tuple[Tensor, Tensor]:
    """Distances, and how far each is from a jump: where the nearest crossing is about 1.5 steps away."""
    sizes = torch.tensor(grid.shape[-4:-1])
    steps = (aabb[1] - aabb[0]).abs() / (sizes - 1).clamp(min=1)
    vertices = torch.cartesian_prod(*(torch.arange(n) for n in sizes.tolist())).double()[:, None]
    channels = grid.movedim(-1, -4).contiguous()
    result, margin = torch.empty_like(channels), torch.empty_like(channels)
    lists = [x.flatten(0, -4) for x in (channels, result, margin)]
    for values, distances, margins in zip(*lists, strict=True):
        away = (vertices - torch.cat((_edge_crossings(values), torch.full((1, 3), math.inf).double()))).abs()
        nearest = (away * steps).square().sum(-1).amin(1).sqrt()
        on_line = torch.stack([(away[..., [i - 1, i - 2]] == 0).all(-1) for i in range(3)], dim=-1)
        counts = torch.where(on_line, away, math.inf).amin(1)
        plane = (counts * steps).pow(-2).sum(-1).rsqrt()
        distance = torch.where((counts <= 1.5).any(-1), plane, nearest).view_as(values)
        distances.copy_(torch.where(values < 0, -distance, distance))
        margins.copy_((counts - 1.5).abs().amin(-1).view_as(values))
    return result.movedim(-4, -1), margin.movedim(-4, -1)


def _same_off_jumps(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """The last of what is expected says how far each row is from where the slightest error makes another value."""
    *expected, margin = expected
    if arguments["aabb"].numel() == 0 or ("grid" in arguments and _is_flat(arguments["aabb"])):
        return
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape
        kept = (margin > 1e-2).expand_as(e)
        a, e = a.detach().cpu()[kept], e[kept]
        assert torch.equal(a.isfinite(), e.isfinite()), f"result {index}"
        assert_matches(a[e.isfinite()], e[e.isfinite()], f"result {index}")


def _signs_kept(arguments: dict[str, Any], result: tuple[Tensor, ...]) -> None:
    grid, found = arguments["grid"].cpu(), result[0].cpu()
    known = ~grid.isnan()
    assert bool(found[~known].isnan().all()), "an unknown value has got a distance"
    if bool((arguments["aabb"].abs() < 1e3).all()) and not _is_flat(arguments["aabb"]):
        assert not bool(found[known].isnan().any()), "a known value has lost its distance"
        assert torch.equal(found[known].signbit(), grid[known] < 0), "a sign has changed"


@st.composite
def _image_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Cameras before the box, which see a slanted surface that has holes."""
    device, dtype, views = draw(devices), draw(st.sampled_from(FLOATS)), draw(st.sampled_from([0, 1, 2]))
    height, width, wide = draw(st.sampled_from([1, 2, 7])), draw(st.sampled_from([1, 3, 6])), arithmetic(dtype)
    pokes = draw(st.sampled_from([[], [0.0, -1.0, math.nan, math.inf]]))
    depths = draw(numbers((views, height, width), torch.float64, 0.5, draw(st.sampled_from([0.6, 2.0])), pokes))
    c2w = torch.eye(4).double() + draw(numbers((views, 4, 4), torch.float64, -0.1, 0.1))
    c2w[:, 2, 3] += draw(st.sampled_from([0.7, 1.5]))
    pinholes = torch.tensor([width, height, width / 2, height / 2]) * draw(numbers((views, 4), torch.float64, 0.9, 1.1))
    aabb = torch.tensor([[-0.5], [0.4]]) + draw(numbers((2, 3), torch.float64, -0.1, 0.1))
    given = {"c2w": c2w, "intrinsics": pinholes, "aabb": aabb}
    arguments = {"depths": depths.to(dtype)} | {name: x.to(wide) for name, x in given.items()}
    if draw(st.booleans()):
        arguments["weights"] = draw(numbers((views, height, width), dtype, 0.2, 1.0))
    if draw(st.booleans()):
        arguments["colors"] = draw(numbers((views, height, width, draw(st.sampled_from([0, 1, 3]))), dtype))
    options = {"into": draw(st.sampled_from([1, 3, [3, 2, 4]])), "truncation": draw(st.sampled_from([0.2, 0.8]))}
    return draw(all_placed({**arguments, **options, "along": draw(st.sampled_from(["axis", "ray"]))}, device))


def _fused(
    depths: Tensor, c2w: Tensor, intrinsics: Tensor, aabb: Tensor, into: Any, truncation: float, along: str, **more: Any
) -> tuple[Tensor, ...]:
    """Vertex after vertex and image after image; and how far each vertex is from a jump."""
    size = [into] * 3 if isinstance(into, int) else list(into)
    weights, colors = more.get("weights"), more.get("colors")
    weights = torch.ones_like(depths) if weights is None else weights
    colors = depths.new_zeros(*depths.shape, 0) if colors is None else colors
    height, width, rows = *depths.shape[1:], []
    axes = [
        low + (high - low) * torch.linspace(0, 1, n, dtype=torch.float64)
        for low, high, n in zip(*aabb, size, strict=True)
    ]
    for point in torch.cartesian_prod(*axes):
        count, total, near, color, margin = 0.0, 0.0, 0.0, depths.new_zeros(colors.shape[-1]), 1.0
        for view, (fx, fy, cx, cy) in enumerate(intrinsics.tolist()):
            arm = point - c2w[view, :3, 3]
            right, up, backward = (c2w[view, :3, :3].T @ arm).tolist()
            margin = min(margin, abs(backward))
            if backward >= 0:
                continue
            column, row = cx - fx * right / backward, cy + fy * up / backward
            margin = min(margin, *(abs(x - round(x)) for x in (column, row)))
            if not (0 <= column < width and 0 <= row < height):
                continue
            x, y = min(max(column - 0.5, 0), width - 1), min(max(row - 0.5, 0), height - 1)
            corners = [(min(int(y) + j, height - 1), min(int(x) + i, width - 1)) for j in (0, 1) for i in (0, 1)]
            around = depths[view][tuple(torch.tensor(corners).T)]
            depth, pixel = float(depths[view, int(row), int(column)]), (view, int(row), int(column))
            span = float(around.max() - around.min())
            margin = min(margin, 1.0 if math.isnan(span) else abs(span - truncation))
            if span < truncation and bool((around > 0).all()):
                u, v = x - int(x), y - int(y)
                depth = sum(map(operator.mul, around.tolist(), [(1 - u) * (1 - v), u * (1 - v), (1 - u) * v, u * v]))
            if not depth > 0:
                continue
            reach = float(arm.norm())
            before = (depth * (reach / -backward if along == "axis" else 1.0) - reach) / truncation
            margin = min(margin, abs(before - 1), abs(before + 1))
            if before < -1:
                continue
            weight = float(weights[pixel]) * min(1 + before, 1.0)
            count, total = count + weight, total + weight * min(before, 1.0)
            if before < 1:
                near, color = near + weight, color + weight * colors[pixel]
        # A mean is not a number where no image counts.
        mean = [truncation * total / count] if count > 0 else [math.nan]
        shown = (color / near if near > 0 else color * math.nan).tolist()
        rows.append([*mean, count, *shown, near, margin])
    return torch.tensor(rows, dtype=torch.float64).view(*size, -1).split((1, 1, colors.shape[-1], 1, 1), dim=-1)


@st.composite
def _surface_arguments(draw: st.DrawFn) -> dict[str, Any]:
    pytest.importorskip("skimage")
    device, dtype, last = draw(devices), draw(st.sampled_from(FLOATS)), draw(st.sampled_from([(), (1,)]))
    arguments = {"grid": draw(numbers((*(draw(_SIZES) for _ in range(3)), *last), dtype)), "aabb": draw(_boxes())}
    arguments |= {"level": draw(st.sampled_from([0.0, 0.4, -2])), "inside": draw(st.sampled_from(["below", "above"]))}
    return draw(all_placed(arguments, device))


def _level_crossings(grid: Tensor, aabb: Tensor, level: float, inside: str) -> tuple[Tensor, Tensor]:
    values = grid.reshape(grid.shape[:3]) - level
    found = _edge_crossings(values)
    return (found[:0] if min(values.shape) < 2 else found), values.abs().amin()


def _on_surface(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Each crossing has a vertex, and each vertex a crossing, but for those within cells; triangles are of vertices."""
    (vertices, faces), (crossings, least), aabb = actual, expected, arguments["aabb"].cpu().double()
    assert vertices.dtype == torch.float32
    assert faces.dtype == torch.int64
    assert torch.equal(faces.unique(), torch.arange(len(vertices))), "vertices are not those of triangles"
    if _is_flat(aabb) or float(least) < 1e-3:  # scikit-image moves a crossing a little off a vertex
        return
    cells = (torch.tensor(arguments["grid"].shape[:3]) - 1).clamp(min=1)
    steps = (vertices.double() - aabb[0]) / (aabb[1] - aabb[0]) * cells
    gaps = torch.cdist(steps, crossings) < 2e-3
    within = ((steps - steps.round()).abs() > 1e-3).sum(-1) == 3
    assert bool((gaps.any(1) | within).all()), "a vertex is off the surface"
    assert bool(gaps.any(0).all()), "a crossing has no vertex"


def _finite_vertices(arguments: dict[str, Any], result: tuple[Tensor, ...]) -> None:
    vertices, faces = result
    assert bool(((faces >= 0) & (faces < len(vertices))).all())
    if bool((arguments["aabb"].abs() < 1e3).all()):
        assert bool(vertices.isfinite().all()), "a vertex is not finite"


@st.composite
def _voxel_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, dtype, batch = draw(devices), draw(st.sampled_from(FLOATS)), draw(st.sampled_from([None, None, 2]))
    sizes, align_corners = [draw(st.sampled_from([1, 2, 5, 9])) for _ in range(3)], draw(st.booleans())
    limits = sizes if batch is None else [batch, *sizes]
    voxels = torch.cartesian_prod(*(torch.arange(n) for n in limits)).view(-1, len(limits))
    order = torch.randperm(len(voxels), generator=torch.Generator().manual_seed(draw(seeds)))
    coords = voxels[order[: draw(st.sampled_from([0, 1, 9, 400]))]]
    coords = coords.to(draw(st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8])))
    features = draw(numbers((len(coords), draw(st.sampled_from([0, 1, 2, 5]))), dtype))
    lead = (draw(st.sampled_from([0, 1, 7, 33, 700])),)
    options = {"resolution": sizes, "batch": batch, "align_corners": align_corners}
    if batch is not None and draw(st.booleans()):
        options["element"] = (draw(numbers(lead, torch.float64, 0, batch))).long()
    elif batch is not None:
        lead = (batch, *lead)
    points = draw(positions(lead, sizes, align_corners, True)).to(arithmetic(dtype))
    options["missing"] = draw(st.sampled_from(["zeros", "renormalize"]))
    return draw(all_placed({"coords": coords, "features": features, "points": points, **options}, device))


def _sample_list(coords: Tensor, features: Tensor, points: Tensor, resolution: Any, batch: Any, **more: Any) -> Tensor:
    return ops.sample_voxels(features, ops.VoxelIndex(coords, resolution, batch), points, **more)


def _sample_dense(
    coords: Tensor, features: Tensor, points: Tensor, resolution: Any, batch: Any, missing: str, **more: Any
) -> Tensor:
    """The same in a dense grid with one more vertex of zeros around, in which all voxels have a column of ones."""
    sizes = torch.tensor([resolution] * 3 if isinstance(resolution, int) else resolution)
    if batch is None and coords.shape[1] == 4 and len(coords):
        batch = int(coords[:, 0].max()) + 1
    coords = coords.long() if coords.shape[1] == 4 else torch.nn.functional.pad(coords.long(), (1, 0))
    lead, count = points.shape[:-1], batch or 1
    columns = torch.cat((features, features.new_ones(len(features), 1)), dim=1)
    grid = features.new_zeros(count, *(sizes + 2).tolist(), columns.shape[1])
    grid = grid.index_put((coords[:, 0], *(coords[:, 1:] + 1).T), columns)
    rows = points.reshape(-1, 3)
    element = more.get("element")
    if element is None:
        element = torch.arange(len(points) if batch is not None else 1)
        element = element.repeat_interleave(len(rows) // max(len(element), 1))
    where = (rows * (sizes - 1) + 1 if more["align_corners"] else rows * sizes + 0.5) / (sizes + 1)
    sums = rows.new_zeros(len(rows), columns.shape[1])
    for one in range(count):
        mine = (element.reshape(-1) == one).nonzero()[:, 0]
        sums = sums.index_put((mine,), reference.sample_grid(grid[one], where[mine], "zeros"))
    sampled, weight = sums[:, :-1], sums[:, -1:]
    if missing == "renormalize":
        sampled = torch.where(weight > 0, sampled / torch.where(weight > 0, weight, 1.0), 0.0)
    return sampled.reshape(*lead, features.shape[1])


DISTANCES = {
    "sample_distance": Subject(
        ops.sample_distance,
        _distance_arguments(),
        _bounds,
        trained=("grid", "points", "aabb"),
        compare=_same_bounds,
        check_extreme=others_unchanged(ops.sample_distance, ("points",)),
        extreme=("points", "aabb"),
    ),
    "redistance": Subject(
        ops.redistance,
        _grid_arguments(),
        _redistanced,
        compare=_same_off_jumps,
        check_extreme=_signs_kept,
        extreme=("grid",),
    ),
    "integrate_depth": Subject(
        ops.integrate_depth,
        _image_arguments(),
        _fused,
        compare=_same_off_jumps,
        extreme=("depths", "c2w", "intrinsics", "aabb", "weights", "colors"),
    ),
    "marching_cubes": Subject(
        ops.marching_cubes,
        _surface_arguments(),
        _level_crossings,
        compare=_on_surface,
        check_extreme=_finite_vertices,
        extreme=("grid", "aabb"),
    ),
    "sample_voxels": Subject(
        _sample_list,
        _voxel_arguments(),
        _sample_dense,
        trained=("features", "points"),
        check_extreme=others_unchanged(_sample_list, ("points",)),
        extreme=("features", "points"),
    ),
}
