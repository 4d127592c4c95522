"""Strategies for tensors: shapes, dtypes, memory layouts, values that are not finite, and what does not fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from op_testing import LAYOUTS
from torch import Tensor

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NOT_FINITE = [math.nan, math.inf, -math.inf]
EXTREMES = [*NOT_FINITE, 0.0, -0.0, 1e-45, 1e-38, 1e30, -1e30, 3.4e38, -3.4e38, 1e300]

devices = st.sampled_from(DEVICES)
seeds = st.integers(0, 2**32 - 1)


def _poke(draw: st.DrawFn, x: Tensor, pokes: Sequence[float]) -> None:
    """Replaces one number of a contiguous tensor."""
    index, value = draw(st.integers(0, x.numel() - 1)), draw(st.sampled_from(list(pokes)))
    x.view(-1)[index] = torch.tensor(value, dtype=torch.float64 if x.is_floating_point() else torch.int64).to(x.dtype)


@st.composite
def numbers(
    draw: st.DrawFn,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float64,
    low: float = -1.0,
    high: float = 1.0,
    pokes: Sequence[float] = (),
) -> Tensor:
    """Numbers evenly spread between two bounds; some of them, at random places, one of ``pokes``."""
    generator = torch.Generator().manual_seed(draw(seeds))
    x = low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)
    if pokes and x.numel():
        for _ in range(draw(st.integers(0, 4))):
            _poke(draw, x, pokes)
    return x.to(dtype)


@st.composite
def offsets_of_rays(draw: st.DrawFn, samples: int, gaps: bool = True) -> Tensor:
    """Offsets (R + 1,) of rays; there may be rows before the first ray and after the last one."""
    rays = draw(st.sampled_from([0, 1, 2, 3, 7]))
    cuts = sorted(draw(st.lists(st.integers(0, samples), min_size=rays + 1, max_size=rays + 1)))
    if not gaps and rays:
        cuts[0], cuts[-1] = 0, samples
    return torch.tensor(cuts)


def _negative_view(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _parameter(x: Tensor) -> Tensor:
    return torch.nn.Parameter(x, requires_grad=False)


_OTHER_MEMORY = {
    "as it is": lambda x: x,
    **LAYOUTS,
    "negative view": _negative_view,
    "inference tensor": _inference,
    "parameter": _parameter,
}


@st.composite
def placed(draw: st.DrawFn, x: Tensor, device: str) -> Tensor:
    """The same values on a device, in memory of any layout."""
    ways = list(_OTHER_MEMORY) if x.is_floating_point() else ["as it is", "reversed strides", "every other row"]
    ways = ways if x.dim() else ["as it is"]
    return _OTHER_MEMORY[draw(st.sampled_from(ways))](x.to(device))


@st.composite
def all_placed(draw: st.DrawFn, arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """The same arguments on a device, each tensor in memory of its own layout."""

    def place(value: Any) -> Any:
        if isinstance(value, list):
            return [place(item) for item in value]
        return draw(placed(value, device)) if isinstance(value, Tensor) else value

    return {name: place(value) for name, value in arguments.items()}


NO_TENSORS: list[Any] = [
    None,
    0,
    1.5,
    "text",
    [],
    [1.0, 2.0],
    {},
    np.zeros((2, 3), np.float32),
    object(),
    torch.float32,
]
NO_NUMBERS: list[Any] = [
    None,
    "text",
    "0.1",
    [],
    [0.5],
    math.nan,
    math.inf,
    -math.inf,
    -1,
    -0.5,
    2.5,
    2**62,
    10**400,
    1j,
    {},
]
OTHER_DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@st.composite
def broken_tensor(draw: st.DrawFn, x: Tensor) -> Any:
    """A tensor of another dtype, shape, device, layout or content, or no tensor."""
    ways = ["no tensor", "dtype", "more dimensions", "fewer dimensions", "longer", "shorter", "empty", "transposed"]
    ways += ["another device", "sparse", "content", "0-dimensional"]
    way = draw(st.sampled_from(ways))
    if way == "no tensor":
        return draw(st.sampled_from(NO_TENSORS))
    if way == "dtype":
        return x.to(draw(st.sampled_from(OTHER_DTYPES)))
    if way == "content":
        return _with_other_content(draw, x)
    if way == "another device":
        return x.to("meta")
    if way == "0-dimensional":
        return x.new_zeros(())
    if way == "more dimensions":
        return x.unsqueeze(draw(st.integers(0, x.dim())))
    if x.dim() == 0:
        return x
    dim = draw(st.integers(0, x.dim() - 1))
    if way == "sparse":
        return x.to_sparse()
    if way == "transposed":
        return x.transpose(0, dim)
    if way == "longer":
        return torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim)
    if way == "empty":
        return x.narrow(dim, 0, 0)
    if x.shape[dim] == 0:
        return x
    return x.select(dim, 0) if way == "fewer dimensions" else x.narrow(dim, 0, x.shape[dim] - 1)


def _with_other_content(draw: st.DrawFn, x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if x.numel() == 0 or x.dtype == torch.bool:
        return x
    extremes = EXTREMES if x.is_floating_point() else [0, -1, 1, 2**31 - 1, -(2**31)]
    if x.dtype == torch.int64:
        extremes = [*extremes, 2**63 - 1, -(2**63)]
    _poke(draw, x, extremes)
    return x


@st.composite
def broken_arguments(draw: st.DrawFn, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments but for one, which is broken somehow."""
    name = draw(st.sampled_from(sorted(arguments)))
    value = arguments[name]
    if isinstance(value, Tensor):
        other: Any = draw(broken_tensor(value))
    elif isinstance(value, list) and value and isinstance(value[0], Tensor):
        index = draw(st.integers(0, len(value) - 1))
        others = [value[:index], [*value, *value] * 20, value[0], [*value[:index], draw(broken_tensor(value[index]))]]
        other = draw(st.sampled_from([*others, [*others[-1], *value[index + 1 :]], *NO_TENSORS]))
    elif isinstance(value, bool):
        other = not value  # anything has a truth value in Python
    else:
        other = draw(st.sampled_from([*NO_NUMBERS, *NO_TENSORS[4:], torch.zeros(2)]))
    return {**arguments, name: other}


@st.composite
def poked(draw: st.DrawFn, arguments: dict[str, Any], names: Sequence[str], pokes: Sequence[float]) -> dict[str, Any]:
    """The same arguments with some numbers of some tensors replaced."""

    def poke(x: Tensor) -> Tensor:
        x = x.detach().clone(memory_format=torch.contiguous_format)
        for _ in range(draw(st.integers(1, 4)) if x.numel() else 0):
            _poke(draw, x, pokes)
        return x

    changed = {name: arguments[name] for name in names if name in arguments}
    return arguments | {
        name: [poke(x) for x in value] if isinstance(value, list) else poke(value) for name, value in changed.items()
    }


def others_unchanged(
    call: Callable[..., Any], by_row: Sequence[str], packed: bool = False
) -> Callable[[dict[str, Any], tuple[Tensor, ...]], None]:
    """Makes a check that rows with extreme numbers, and the rays that they belong to, change no other one by a bit.

    Those rows are made ordinary and the function is called again. Arguments ``by_row`` have a row for each sample if
    there are ``ray_offsets``, for each ray otherwise; results have rows of either, or are ``packed`` samples. What else
    is extreme, such as a box or a grid, may change everything.
    """

    def is_calm(x: Tensor) -> Tensor:
        return (x.double().abs() < 1e3).flatten(1).all(1) if x.dim() > 1 else x.double().abs() < 1e3

    def check(arguments: dict[str, Any], result: tuple[Tensor, ...]) -> None:
        floating = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()}
        rows = {name: floating[name] for name in by_row if name in floating and floating[name].dim()}
        lengths = {len(x) for x in rows.values()}
        others = [x for name, x in floating.items() if name not in rows and name != "dt"]
        others += [x for xs in arguments.values() if isinstance(xs, list) for x in xs if isinstance(x, Tensor)]
        offsets = arguments.get("ray_offsets")
        if len(lengths) != 1 or not all(bool(is_calm(x).all()) for x in others if x.numel()):
            return
        (count,) = lengths
        calm = torch.stack([is_calm(x).cpu() for x in rows.values()]).all(0)
        kept, of_rays = calm, None
        if isinstance(offsets, Tensor):
            spans = list(itertools.pairwise(offsets.tolist()))
            of_rays = torch.tensor([bool(calm[a:b].all()) for a, b in spans], dtype=torch.bool)
            kept = torch.zeros(count, dtype=torch.bool)
            for (a, b), keep in zip(spans, of_rays.tolist(), strict=True):
                kept[a:b] = keep
        ordinary = {
            name: torch.where(calm.to(x.device).view(-1, *(1,) * (x.dim() - 1)), x, 0.5).to(x.dtype)
            for name, x in rows.items()
        }
        again = [x for x in torch.utils._pytree.tree_leaves(call(**arguments | ordinary)) if isinstance(x, Tensor)]
        if packed:  # positions, t, dt, ray_index, ray_offsets, rays_kept
            if arguments.get("capacity") is not None:
                return  # how many rays fit depends on all of them
            of_a_ray = [[y.cpu()[: int(x[4][-1])] for y in (x[1], x[3])] for x in (result, again)]
            found, expected = (t[kept[index]] for t, index in of_a_ray)
            assert torch.equal(found, expected), "other rays have other samples"
            return
        for index, (one, other) in enumerate(zip(result, again, strict=True)):
            keep = of_rays if of_rays is not None and (len(of_rays) != count) and len(one) == len(of_rays) else kept
            if len(one) == len(keep) and (of_rays is None or len(of_rays) != count):
                same = torch.equal(one.cpu()[keep].nan_to_num(), other.cpu()[keep].nan_to_num())
                assert same, f"result {index}: other rows have changed"

    return check
