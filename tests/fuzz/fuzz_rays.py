"""The ops on samples that are packed by ray: compositing, weights, sums, scans, indices and selection."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import reference
import torch
from fuzz_property import Subject, by_row, doubles, same_integers
from fuzz_values import FLOATS, all_placed, devices, numbers, offsets_of_rays, others_unchanged
from hypothesis import strategies as st
from op_contracts import CONTRACTS
from torch import Tensor

from voxelfield import ops

_SAMPLES = st.sampled_from([0, 1, 2, 9, 33, 70])
_LIMITS = st.sampled_from([0.0, 1e-4, 0.05, 0.5])
_ALLOWED_WITH = {torch.float64: [torch.float64]}
_SINGLE = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def _samples(draw: st.DrawFn, *names: str, **options: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Samples of some names beside ``ray_offsets``; no transmittance comes near a limit by rounding alone."""
    device, count = draw(devices), draw(_SAMPLES)
    dtype = draw(st.sampled_from(FLOATS))
    arguments: dict[str, Any] = {}
    for index, name in enumerate(names):
        own = dtype if index == 0 else draw(st.sampled_from(_ALLOWED_WITH.get(dtype, _SINGLE)))
        shape = (count, 3) if name == "rgb" else (count,)
        low, high = {
            "density": (0.1, draw(st.sampled_from([2.0, 40.0]))),
            "alpha": (0.01, 0.99),
            "dt": (0.05, 0.2),
        }.get(name, (-1.0, 1.0))
        # A wall, or nothing.
        pokes = {"density": (0.0, 2000.0), "alpha": (0.0, 1.0)}.get(name, ())
        arguments[name] = draw(numbers(shape, own, low, high, pokes))
    if "t" in arguments:
        arguments["t"] = arguments["t"].double().abs().sort().values.to(arguments["t"].dtype)
    arguments["ray_offsets"] = draw(offsets_of_rays(count))
    arguments |= {name: draw(value) for name, value in options.items()}
    return draw(all_placed(arguments, device))


def _diverged_shows(arguments: dict[str, Any], result: tuple[Tensor, ...]) -> None:
    """A ray whose first sample has a density or colour that is not finite is not finite itself."""
    offsets = arguments["ray_offsets"].cpu()
    density, rgb, color = arguments["density"].cpu(), arguments["rgb"].cpu(), result[0].detach().cpu()
    dt = reference.lengths(arguments["dt"], density).cpu()
    for ray, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
        if first == last:
            assert not bool(color[ray].any())
            continue
        bad = not bool(density[first].isfinite())
        if bad and bool(dt[first] > 0):
            assert not bool(color[ray].isfinite().any()), "a density that is not finite passes for a colour"
        elif bool(density[first] * dt[first] > 0.1):
            wrong = ~rgb[first].isfinite()
            assert not bool(color[ray][wrong].isfinite().any()), "a colour that is not finite passes for another"


@st.composite
def _sum_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, count, dtype = draw(devices), draw(_SAMPLES), draw(st.sampled_from(FLOATS))
    shape = draw(st.sampled_from([(count,), (count, 0), (count, 1), (count, 3), (count, 33)]))
    arguments = {"values": draw(numbers(shape, dtype)), "ray_offsets": draw(offsets_of_rays(count))}
    if draw(st.booleans()):
        own = draw(st.sampled_from(_ALLOWED_WITH.get(dtype, _SINGLE)))
        arguments["weights"] = draw(numbers((count,), own))
    return draw(all_placed(arguments, device))


def _sum_reference(values: Tensor, ray_offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    if weights is not None:
        assert weights.shape == values.shape[:1]
        values = values * (weights if values.dim() == 1 else weights[:, None])
    return reference.ray_sums(values, ray_offsets)


@st.composite
def _scan_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, count, dtype = draw(devices), draw(_SAMPLES), draw(st.sampled_from(FLOATS))
    shape = draw(st.sampled_from([(count,), (count, 0), (count, 1), (count, 9)]))
    values = draw(numbers(shape, dtype, -1.0, 1.0, (0.0,)))
    return draw(all_placed({"values": values, "ray_offsets": draw(offsets_of_rays(count))}, device))


@st.composite
def _index_arguments(draw: st.DrawFn) -> dict[str, Any]:
    rays, dtype = draw(st.sampled_from([1, 5, 40])), draw(st.sampled_from([torch.int64, torch.int32]))
    index = draw(st.lists(st.integers(0, rays - 1), max_size=20).map(sorted))
    return draw(all_placed({"ray_index": torch.tensor(index, dtype=dtype), "rays": rays}, draw(devices)))


@st.composite
def _offset_arguments(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(_SAMPLES)
    arguments = {"ray_offsets": draw(offsets_of_rays(count)), "samples": count}
    return draw(all_placed(arguments, draw(devices)))


@st.composite
def _interval_arguments(draw: st.DrawFn) -> dict[str, Any]:
    arguments = draw(_samples("weights"))
    lengths = draw(numbers((2 * len(arguments["weights"]),), torch.float32, 0.1, 1.0)).double()
    ends = lengths.cumsum(0).view(-1, 2).float().to(arguments["weights"].device)
    arguments |= {"t_starts": ends[:, 0].clone(), "t_ends": ends[:, 1].clone(), "count": draw(st.integers(0, 5))}
    return arguments


def _same_distances(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compares shares of the distribution, because a rounded share can lie on the other side of a gap."""
    (drawn,), (wanted,) = actual, expected
    assert drawn.shape == wanted.shape
    assert bool((drawn.diff(dim=1) >= 0).all())
    offsets = arguments["ray_offsets"].tolist()
    starts, ends, weights = (arguments[name].cpu().double() for name in ("t_starts", "t_ends", "weights"))
    for ray, (first, last) in enumerate(itertools.pairwise(offsets)):
        if last == first or not drawn.shape[1]:
            continue
        low, high, masses = starts[first:last], ends[first:last], weights[first:last].clamp(min=0)
        masses = masses if float(masses.sum()) > 0 else high - low
        shares = [
            (((t - low) / (high - low)).clamp(0, 1) * masses).sum() / masses.sum()
            for t in drawn[ray].cpu().double().tolist()
        ]
        count = drawn.shape[1]
        exact = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        torch.testing.assert_close(torch.stack(shares), exact, rtol=0, atol=1e-4)


@st.composite
def _select_arguments(draw: st.DrawFn) -> dict[str, Any]:
    device, count = draw(devices), draw(_SAMPLES)
    arguments = {
        "density": draw(numbers((count,), torch.float32, 0.1, 20.0, (0.0, 2000.0))),
        "positions": draw(numbers((count, 3), torch.float32)),
        "t": draw(numbers((count,), torch.float32, 0.0, 4.0)),
        "dt": draw(numbers((count,), torch.float32, 0.05, 0.2)),
        "ray_offsets": draw(offsets_of_rays(count)),
        "min_transmittance": draw(st.sampled_from([1e-4, 0.05, 0.5])),
        "min_weight": draw(st.sampled_from([0.0, 1e-4, 0.01, 0.3])),
        "capacity": draw(st.sampled_from([None, None, 0, 1, 5, 100])),
    }
    return draw(all_placed(arguments, device))


def _same_samples(arguments: dict[str, Any], actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    light = {name: arguments[name] for name in ("density", "dt", "ray_offsets", "min_transmittance")}
    weights, _ = reference.light(**doubles(light))
    limit = arguments.get("min_weight", 1e-4)
    if bool(((weights - limit).abs() < 1e-6).logical_and(weights > 0).any()):
        return  # rounding may keep such a sample or drop it
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if expected[4].shape[0] == 1 and index == 3:
            continue  # no ray is the last one
        assert torch.equal(a.cpu().double().nan_to_num(7e9), e.double().nan_to_num(7e9)), (
            f"result {index}: {a}, not {e}"
        )


def _other_rays_selected(arguments: dict[str, Any], result: tuple[Tensor, ...]) -> None:
    """The kept samples of a ray are among its own, whatever they hold."""
    offsets, kept_offsets = arguments["ray_offsets"].cpu(), result[4].cpu()
    for ray, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
        kept = slice(*kept_offsets[ray : ray + 2].tolist())
        for name, copies in zip(("t", "dt"), result[1:3], strict=True):
            own = arguments[name].detach().cpu().expand(arguments["density"].shape)[first:last]
            assert bool(torch.isin(copies.cpu()[kept].nan_to_num(7e9), own.nan_to_num(7e9)).all()), f"{name} of others"


RAYS = {
    "composite": Subject(
        ops.composite,
        _samples("density", "rgb", "t", "dt", min_transmittance=_LIMITS, distortion=st.booleans()),
        reference.composite,
        trained=("density", "rgb", "t", "dt"),
        factors={"dt": "density"},
        check_extreme=_diverged_shows,
        extreme=("density", "rgb"),
    ),
    "composite_alphas": by_row(
        ops.composite_alphas,
        _samples("alpha", "rgb", "t", min_transmittance=_LIMITS),
        reference.composite_alphas,
        ("alpha", "rgb", "t"),
    ),
    **{
        f"{kind}_{part}": by_row(
            getattr(ops, f"{kind}_{part}"),
            _samples(*samples, min_transmittance=_LIMITS),
            lambda place=place, **x: reference.light(**x)[place],
            samples,
            **more,
        )
        for kind, samples, more in (
            ("ray", ("density", "dt"), {"trained": ("density", "dt"), "factors": {"dt": "density"}}),
            ("alpha", ("alpha",), {}),
        )
        for place, part in enumerate(("weights", "transmittance"))
    },
    "sum_along_rays": Subject(
        ops.sum_along_rays,
        _sum_arguments(),
        _sum_reference,
        trained=("values", "weights"),
        check_extreme=others_unchanged(ops.sum_along_rays, ("values", "weights")),
        extreme=("values",),
    ),
    **{
        name: by_row(
            getattr(ops, name),
            _scan_arguments(),
            partial(reference.scan, inclusive=name.startswith("in"), product=name.endswith("prod")),
            ("values",),
            trained=("values",),
        )
        for name in ("inclusive_sum", "exclusive_sum", "inclusive_prod", "exclusive_prod")
    },
    "offsets_from_ray_index": Subject(
        ops.offsets_from_ray_index,
        _index_arguments(),
        CONTRACTS["offsets_from_ray_index"].reference,
        compare=same_integers,
    ),
    "pack_info": Subject(ops.pack_info, _index_arguments(), CONTRACTS["pack_info"].reference, compare=same_integers),
    "ray_index_from_offsets": Subject(
        ops.ray_index_from_offsets, _offset_arguments(), reference.ray_index_from_offsets, compare=same_integers
    ),
    "importance_sample": by_row(
        ops.importance_sample,
        _interval_arguments(),
        reference.draw,
        ("t_starts", "t_ends", "weights"),
        compare=_same_distances,
    ),
    "select_samples": Subject(
        ops.select_samples,
        _select_arguments(),
        reference.select,
        compare=_same_samples,
        check_extreme=_other_rays_selected,
        extreme=("density", "positions", "t", "dt"),
    ),
}
