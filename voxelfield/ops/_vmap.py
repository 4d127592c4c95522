"""Batching rules: fold a dimension that ``torch.vmap`` maps over into dimensions that the stencil ops already have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from voxelfield import _library
from voxelfield.ops._autograd import MaybeTensor, raw_ops
from voxelfield.ops._stencil import Stencil

_fragment = torch.library.Library("voxelfield", "FRAGMENT")

# How deeply torch.autograd may nest batched gradients of batched gradients.
_MAX_NESTING = 8


class Folding:
    """Turns the inputs of ``size`` mapped calls into those of a single call, and unfolds its result.

    Sources that are the same in all calls are not repeated if points can share them: the points of all calls then
    become more points of the same source. Otherwise the calls become elements of the batch. ``batched`` tells whether
    the mapped calls have a batch dimension themselves; ``source_dims`` is None if the op has no sources.
    """

    def __init__(
        self, stencil: Stencil, size: int, batched: bool, source_dims: Sequence[int | None] | None = None
    ) -> None:
        self._size = size
        self._shared = source_dims is not None and stencil.shareable and all(dim is None for dim in source_dims)
        self._axis = int(self._shared and batched)
        self._merges = self._shared or batched
        self._lead = int(stencil.with_gradient)

    def points(self, x: MaybeTensor, dim: int | None) -> MaybeTensor:
        """Folds points, or directions."""
        return None if x is None else self._fold(x, dim, self._axis)

    def values(self, x: Tensor, dim: int | None) -> Tensor:
        """Folds values."""
        return self._fold(x, dim, self._axis + self._lead)

    def sources(self, sources: Sequence[Tensor], dims: Sequence[int | None]) -> Sequence[Tensor]:
        """Folds sources."""
        return sources if self._shared else [self._fold(x, dim, 0) for x, dim in zip(sources, dims, strict=True)]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a folded source, given its shape in a mapped call."""
        return (self._size * shape[0], *shape[1:]) if self._merges else (self._size, *shape)

    def unfold_points(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns a result shaped like points with its mapped dimension restored, and the index of that dimension."""
        return self.unfold(x, self._axis), self._axis

    def unfold_values(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns a result shaped like values with its mapped dimension restored, and the index of that dimension."""
        return self.unfold(x, self._axis + self._lead), self._axis + self._lead

    def unfold(self, x: Tensor, axis: int = 0) -> Tensor:
        """Returns a result with the mapped dimension restored at ``axis``."""
        return x.unflatten(axis, (self._size, x.shape[axis] // self._size)) if self._merges else x

    def _fold(self, x: Tensor, dim: int | None, axis: int) -> Tensor:
        if dim is None:
            x = x.unsqueeze(axis).expand(*x.shape[:axis], self._size, *x.shape[axis:])
        else:
            x = x.movedim(dim, axis)
        return x.flatten(axis, axis + 1) if self._merges else x


@dataclass(frozen=True)
class Mapping:
    """The information that a batching rule receives besides its arguments, named as in ``torch.library``."""

    batch_size: int


Rule = Callable[..., tuple[Any, Any]]

_rules: dict[str, Rule] = {}


def register_batching(op: str, rule: Rule) -> None:
    """Registers a raw op's batching rule for ``torch.vmap`` and for autograd's own batches of gradients.

    The latter are ``torch.autograd.grad(..., is_grads_batched=True)`` and
    ``torch.autograd.functional.jacobian(..., vectorize=True)``, which use an older mechanism of torch. The rule takes
    an object with ``batch_size``, the mapped dimension of each argument (None if it is not mapped) and the arguments;
    it returns the result and its mapped dimension. Lists of tensors have lists of dimensions.
    """

    def batch_gradients(*args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        # Search from the innermost level. The current level is not known here: on CUDA this runs in autograd's device
        # thread, while torch counts levels in the thread that started the backward pass.
        for level in range(_MAX_NESTING, 0, -1):
            sizes = [_mapped_size(leaf, level) for leaf in leaves]
            size = next((size for size in sizes if size is not None), None)
            if size is not None:
                break
        else:
            raise RuntimeError(f"torch.ops.voxelfield.{op} was asked to map over a dimension that no argument has")
        plain = [
            leaf if own is None else torch._remove_batch_dim(leaf, level, size, 0)
            for leaf, own in zip(leaves, sizes, strict=True)
        ]
        dims = [None if own is None else 0 for own in sizes]
        result, result_dims = rule(
            Mapping(size), pytree.tree_unflatten(dims, structure), *pytree.tree_unflatten(plain, structure)
        )
        if isinstance(result, Tensor):
            return torch._add_batch_dim(result, result_dims, level)
        return [torch._add_batch_dim(x, dim, level) for x, dim in zip(result, result_dims, strict=True)]

    _rules[op] = rule
    _fragment.impl(op, batch_gradients, "Batched")


def _mapped_size(x: Any, level: int) -> int | None:
    """Returns the length of the dimension that a level maps over, or None if ``x`` is not mapped at that level."""
    if not isinstance(x, Tensor):
        return None
    # torch expands a tensor that is not mapped to the size passed in; a mapped tensor keeps its own length.
    one, two = (int(torch._remove_batch_dim(x, level, size, 0).shape[0]) for size in (1, 2))
    return one if one == two else None


def _map(op: str, info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """Applies the batching rule of a raw op. Without one, torch would run the op once for each call."""
    if op not in _rules:
        raise NotImplementedError(f"{op} cannot be mapped by torch.vmap: call it once with the inputs of all calls")
    return _rules[op](info, dims, *args)


@_library.when_loaded
def _register() -> None:
    for op in raw_ops():
        torch.library.register_vmap(f"voxelfield::{op}", partial(_map, op), lib=_fragment)
