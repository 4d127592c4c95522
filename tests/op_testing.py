"""What the tests of the two stencil ops share: memory layouts, and looking at what autograd does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CHANNELS = [1, 2, 3, 4, 5, 8, 12, 16, 28, 33]


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


class OpRecorder(TorchDispatchMode):
    """Records the names of the voxelfield ops that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "voxelfield":
            self.names.append(func._schema.name.removeprefix("voxelfield::"))
        return func(*args, **(kwargs or {}))


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
def threads(count: int) -> Iterator[None]:
    """Runs its body with a number of CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
