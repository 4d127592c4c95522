"""The ops that walk through occupied space, and the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import reference
import torch
from fuzz_property import Subject, same_integers
from fuzz_values import all_placed, devices, numbers, others_unchanged, seeds
from hypothesis import strategies as st
from march_testing import assert_same_samples
from tolerances import assert_matches
from torch import Tensor
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.fields.decoders import spherical_harmonics

_CELLS = st.sampled_from([1, 2, 3, 4, 5, 9])
_RAYS = st.sampled_from([0, 1, 2, 5])


@st.composite
def boxes(draw: st.DrawFn) -> Tensor:
    low = draw(numbers((3,), torch.float32, -2.0, 0.5))
    return torch.stack((low, low + draw(numbers((3,), torch.float32, 0.3, 2.0))))


@st.composite
def occupied_cells(draw: st.DrawFn) -> Tensor:
    share = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    return draw(numbers([draw(_CELLS) for _ in range(3)], low=0.0)) < share


@st.composite
def _walk(draw: st.DrawFn, count: int, box: Tensor) -> dict[str, Tensor]:
    """Rays from within a box and from outside, some along an axis, some that miss it, some of no length."""
    generator = torch.Generator().manual_seed(draw(seeds))
    inside = box[0] + (box[1] - box[0]) * torch.rand(count, 3, generator=generator)
    directions = torch.randn(count, 3, generator=generator)
    for _ in range(draw(st.integers(0, 2)) if count else 0):
        ray, axis = draw(st.integers(0, count - 1)), draw(st.integers(0, 2))
        directions[ray] = torch.eye(3)[axis] * draw(st.sampled_from([1.0, -1.0]))
    directions = F.normalize(directions, dim=-1)
    origins = inside - draw(st.sampled_from([0.0, 1.0, 30.0])) * directions
    near = torch.rand(count, generator=generator)
    far = near + draw(st.sampled_from([-1.0, 0.0, 2.0, 4.0])) * torch.rand(count, generator=generator)
    return {"origins": origins, "directions": directions, "near": near, "far": far}


@st.composite
def _march_arguments(draw: st.DrawFn) -> dict[str, Any]:
    count, box = draw(_RAYS), draw(boxes())
    arguments: dict[str, Any] = draw(_walk(count, box))
    arguments |= {"occupied": draw(occupied_cells()), "aabb": box, "step": draw(st.sampled_from([0.06, 0.21, 1.5]))}
    arguments["offset"] = draw(numbers((count,), torch.float32, 0.0, 0.99))
    if draw(st.booleans()):
        del arguments["offset"]
    # Rows that are few, none, or more than enough.
    arguments["capacity"] = draw(st.sampled_from([None, None, 0, 7, 1000]))
    return draw(all_placed(arguments, draw(devices)))


def _march_reference(offset: Tensor | None = None, capacity: int | None = None, **scene: Any) -> list[Tensor]:
    for name in ("origins", "directions"):
        assert scene[name].shape == (len(scene["near"]), 3)
    assert scene["aabb"].shape == (2, 3)
    assert scene["occupied"].dtype == torch.bool
    midpoints = torch.full_like(scene["near"], 0.5)
    positions, t, index, offsets = reference.march(**scene, offset=midpoints if offset is None else offset)
    # As in PackedSamples.
    return [positions, t, torch.full_like(t, scene["step"]), index, offsets, torch.tensor([len(scene["near"])])]


def _same_march(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    scene = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    offset = scene.get("offset")
    offset = torch.full_like(scene["near"], 0.5) if offset is None else offset
    samples, wanted = ops.PackedSamples(*(x.cpu() for x in actual)), ops.PackedSamples(*expected)
    used, capacity = int(samples.ray_offsets[-1]), scene.get("capacity")
    if capacity is not None:
        assert len(samples.t) == capacity
        assert bool(samples.positions[used:].isnan().all())
        kept = int(samples.rays_kept)
        assert used <= capacity
        assert bool((samples.ray_offsets[kept:] == used).all())
        if kept < len(scene["near"]):  # the next ray did not fit, but for a sample on a border or two
            assert int(wanted.ray_offsets[kept + 1]) > capacity - 2
        rows = int(wanted.ray_offsets[kept])
        wanted = ops.PackedSamples(*(x[:rows] for x in wanted[:4]), *wanted[4:])
        samples = ops.PackedSamples(*(x[:used] for x in samples[:4]), *samples[4:])
    assert len(samples.t) == used
    assert_same_samples(samples, wanted, scene, offset, scene["step"])


@st.composite
def _levels_arguments(draw: st.DrawFn) -> dict[str, Any]:
    arguments: dict[str, Any] = draw(_march_arguments())
    arguments.pop("offset", None)
    return arguments | {"occupied": arguments["occupied"][None], "aabbs": arguments.pop("aabb").reshape(1, 6)}


def _one_level(occupied: Tensor, aabbs: Tensor, **walk: Any) -> dict[str, Any]:
    """The arguments of a march through one box, in steps of one length, as ``march_rays`` has them."""
    return walk | {"occupied": occupied[0], "aabb": aabbs.reshape(2, 3)}


@st.composite
def _pack_arguments(draw: st.DrawFn) -> dict[str, Any]:
    return draw(all_placed({"occupied": draw(occupied_cells())}, draw(devices)))


@st.composite
def _render_arguments(draw: st.DrawFn) -> dict[str, Any]:
    count, box, degree = draw(_RAYS), draw(boxes()), draw(st.integers(0, 3))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    channels = 1 + 3 * (degree + 1) ** 2 + draw(st.sampled_from([0, 0, 3]))
    arguments: dict[str, Any] = draw(_walk(count, box))
    arguments |= {
        "occupied": draw(occupied_cells()),
        "aabb_occupancy": box,
        "grid": draw(numbers([*(draw(_CELLS) for _ in range(3)), channels], dtype, -2.0, 2.0)),
        "aabb_grid": draw(st.sampled_from([box, 2 * box - box.mean(0)])),
        "step": draw(st.sampled_from([0.11, 0.4])),
        "degree": degree,
        "density_scale": draw(st.sampled_from([0.0, 1.0, 15.0])),
        "density_shift": draw(st.sampled_from([0.0, -1.5])),
        "min_transmittance": draw(st.sampled_from([0.0, 1e-4, 0.3])),
    }
    return draw(all_placed(arguments, draw(devices)))


def _render_reference(
    grid: Tensor,
    aabb_occupancy: Tensor,
    aabb_grid: Tensor,
    degree: int,
    density_scale: float,
    density_shift: float,
    min_transmittance: float = 1e-4,
    **walk: Any,
) -> tuple[Tensor, ...]:
    positions, t, dt, index, offsets, _ = _march_reference(aabb=aabb_occupancy, **walk)
    features = reference.sample_grid(grid, (positions - aabb_grid[0]) / (aabb_grid[1] - aabb_grid[0]))
    density = density_scale * F.softplus(features[:, 0] + density_shift)
    basis = spherical_harmonics(walk["directions"], degree)[index]
    coefficients = features[:, 1 : 1 + 3 * (degree + 1) ** 2].unflatten(1, (3, (degree + 1) ** 2))
    rgb = torch.sigmoid((coefficients * basis[:, None]).sum(-1))
    return reference.composite(density, rgb, t, dt, offsets, min_transmittance)[:3]


def _same_image(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """A sample within rounding of a cell's border may be there or not: rays with such a one are not compared."""
    scene = {name: x.cpu().double() for name, x in arguments.items() if isinstance(x, Tensor)}
    step = arguments["step"]
    shape = torch.tensor(scene["occupied"].shape)
    low, high = scene["aabb_occupancy"]
    for ray in range(len(scene["near"])):
        count = max(math.ceil((scene["far"][ray] - scene["near"][ray]).item() / step) + 1, 0)
        t = scene["near"][ray] + (torch.arange(count) + 0.5) * step
        cells = (scene["origins"][ray] + t[:, None] * scene["directions"][ray] - low) / (high - low) * shape
        on_border = ((cells - cells.round()).abs() < 1e-4).any(dim=-1) | ((t - scene["far"][ray]).abs() < 1e-5)
        if bool(on_border.any()):
            continue
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            torch.testing.assert_close(
                a[ray].detach().cpu().double(),
                e[ray].detach(),
                rtol=1e-4,
                atol=3e-4,
                msg=lambda m, i=index: f"{i}: {m}",
            )


_DTYPES_OF_WEIGHTS = {torch.float32: [torch.float32], torch.float64: [torch.float64]}


@st.composite
def _mlp_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device = draw(devices)
    dtypes = [torch.float16] if device == "cuda" else [torch.float32, torch.float64, torch.float16, torch.bfloat16]
    dtype = draw(st.sampled_from(dtypes))
    own = draw(st.sampled_from(_DTYPES_OF_WEIGHTS.get(dtype, [dtype, torch.float32])))
    widths = draw(st.lists(st.sampled_from([1, 2, 3, 8, 16, 17, 33, 64, 128]), min_size=3, max_size=6))
    count = draw(st.sampled_from([0, 1, 5, 33]))
    pairs = zip(widths[1:], widths[:-1], strict=True)
    weights = [draw(numbers((out, into), own, -1.5 / into**0.5, 1.5 / into**0.5)) for out, into in pairs]
    arguments: dict[str, Any] = {"input": draw(numbers((count, widths[0]), dtype)), "weights": weights}
    if draw(st.booleans()):
        rows, kind = draw(st.integers(0, count)), draw(st.sampled_from([torch.int32, torch.int64]))
        arguments["count"] = torch.full(draw(st.sampled_from([(), (1,)])), rows, dtype=kind)
    return draw(all_placed(arguments, device))


def _same_network(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    (value,), (wanted,) = actual, expected
    if value.dtype in (torch.float32, torch.float64):
        assert_matches(value.detach().cpu(), wanted.detach())
        return
    # Activations are rounded between layers, and so are weights.
    assert value.shape == wanted.shape
    error = (value.detach().cpu().double() - wanted.detach()).norm()
    floor = 1.0 * math.sqrt(max(wanted.numel(), 1))
    assert float(error) <= 8 * len(arguments["weights"]) * torch.finfo(value.dtype).eps * (float(wanted.norm()) + floor)


_OF_RAYS = ("origins", "directions", "near", "far", "offset")

MARCHING = {
    "pack_occupancy": Subject(
        lambda occupied: ops.pack_occupancy(occupied).words,
        _pack_arguments(),
        reference.pack_occupancy,
        compare=same_integers,
    ),
    "march_rays": Subject(
        ops.march_rays,
        _march_arguments(),
        _march_reference,
        compare=_same_march,
        check_extreme=others_unchanged(ops.march_rays, _OF_RAYS, packed=True),
        extreme=("origins", "directions", "near", "far", "aabb", "offset"),
    ),
    "march_levels": Subject(
        ops.march_levels,
        _levels_arguments(),
        lambda **arguments: _march_reference(**_one_level(**arguments)),
        compare=lambda arguments, *results: _same_march(_one_level(**arguments), *results),
        check_extreme=others_unchanged(ops.march_levels, _OF_RAYS, packed=True),
        extreme=("origins", "directions", "near", "far", "aabbs"),
    ),
    "render_grid": Subject(
        ops.render_grid,
        _render_arguments(),
        _render_reference,
        compare=_same_image,
        check_extreme=others_unchanged(ops.render_grid, _OF_RAYS),
        extreme=("origins", "directions", "near", "far", "aabb_occupancy", "aabb_grid", "grid"),
    ),
    "mlp": Subject(
        ops.mlp,
        _mlp_arguments(),
        reference.network,
        compare=_same_network,
        check_extreme=others_unchanged(ops.mlp, ("input",)),
        extreme=("input", "weights"),
    ),
}
