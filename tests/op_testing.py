"""What the tests of the stencil ops share: inputs, memory layouts, and looking at what autograd does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tolerances import arithmetic, assert_matches
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CHANNELS = [1, 2, 3, 4, 5, 8, 12, 16, 28, 33]
RESOLUTION = (5, 4, 7)
NON_FINITE = [float("nan"), float("inf"), -float("inf")]

# (padding, align_corners, mode): every way to look a grid up.
LOOKUPS = list(itertools.product(["border", "zeros", "reflection", "periodic"], [True, False], ["linear", "nearest"]))
# Those that F.grid_sample has.
TORCH_LOOKUPS = [lookup for lookup in LOOKUPS if lookup[0] != "periodic"]
LINEAR_LOOKUPS = [lookup for lookup in LOOKUPS if lookup[2] == "linear"]

every_lookup = pytest.mark.parametrize("lookup", LOOKUPS, ids=str)
every_linear_lookup = pytest.mark.parametrize("lookup", LINEAR_LOOKUPS, ids=str)
both_paddings = pytest.mark.parametrize("padding", ["border", "zeros"])


def keywords(lookup):
    return dict(zip(("padding", "align_corners", "mode"), lookup, strict=True))


def points_off_faces(count, device, dtype=torch.float64, resolution=RESOLUTION, align_corners=True):
    """Points in cells from two below the grid to two above, at least a tenth of a cell from any face or middle.

    There the op is smooth in every mode, and a rounded coordinate stays where it is. The eight corners of the
    surroundings come up.
    """
    sizes = torch.tensor(resolution, device=device)
    last = (sizes - 1).clamp(min=1)
    cells = (torch.rand(count, 3, device=device) * (last + 4) - 2).floor()
    u = cells + 0.1 + 0.3 * torch.rand(count, 3, device=device) + 0.5 * torch.randint(2, (count, 3), device=device)
    return (u / last if align_corners else (u + 0.5) / sizes).to(dtype)


def make(device, dtype=torch.float64, channels=3, count=40, resolution=RESOLUTION, align_corners=True):
    grid = torch.randn(*resolution, channels, device=device, dtype=dtype)
    return grid, points_off_faces(count, device, arithmetic(dtype), resolution, align_corners)


def value_and_gradients(sample, *inputs):
    """Value of ``sample`` at all inputs but the last, and its gradients in them; the last is the value's gradient."""
    *inputs, grad = inputs
    inputs = [x.detach().requires_grad_() for x in inputs]
    value = sample(*inputs)
    return value.detach(), *torch.autograd.grad(value, inputs, grad)


def assert_all_match(actual, expected, names=("value", "first gradient", "second gradient")):
    names = [*names, *(f"result {i}" for i in range(len(names), len(expected)))]
    for name, a, e in zip(names, actual, expected, strict=False):
        assert_matches(a.detach(), e.detach().double(), name)
    assert len(actual) == len(expected)


def by_grid_sample(grid, points, padding, align_corners=True, mode="linear"):
    """The same through F.grid_sample: axes reversed, [0, 1] to [-1, 1]."""
    volume = grid.permute(3, 2, 1, 0)[None]
    where = (points * 2 - 1)[None, None, None]
    mode = "bilinear" if mode == "linear" else mode
    sampled = F.grid_sample(volume, where, mode=mode, padding_mode=padding, align_corners=align_corners)
    return sampled[0, :, 0, 0].T


def leaves(*inputs):
    """Copies that require a gradient."""
    return [x.detach().clone().requires_grad_() for x in inputs]


def _reversed_strides(x: Tensor) -> Tensor:
    axes = tuple(reversed(range(x.dim())))
    return x.permute(axes).contiguous().permute(axes)


def _every_other_row(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=0)[::2]


def _wide_rows(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)[..., : x.shape[-1]]


def _misaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_full((1,), float("nan")), x.flatten()])[1:].view(x.shape)


# Each returns the same values in other memory. "misaligned" is contiguous, but no vector load fits its first element.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed strides": _reversed_strides,
    "every other row": _every_other_row,
    "part of wider rows": _wide_rows,
    "misaligned": _misaligned,
}


@contextmanager
def never_synchronising() -> Iterator[None]:
    """Makes torch raise an error where the host waits for a CUDA device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class OpRecorder(TorchDispatchMode):
    """Records the names of the voxelfield ops that run inside it, and the shapes of the last result of each."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes: dict[str, list[torch.Size]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "voxelfield":
            self.names.append(func._schema.name.removeprefix("voxelfield::"))
            self.shapes[self.names[-1]] = [x.shape for x in torch.utils._pytree.tree_leaves(result) if x is not None]
        return result


@contextmanager
def saved_for_backward() -> Iterator[set[int]]:
    """Collects the data pointers of all tensors that autograd keeps alive."""
    pointers: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        pointers.add(x.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield pointers


@contextmanager
def deterministic(wanted: bool = True, warn_only: bool = False) -> Iterator[None]:
    """Runs its body under ``torch.use_deterministic_algorithms``."""
    torch.use_deterministic_algorithms(wanted, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs its body with a number of CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
