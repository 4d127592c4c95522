"""Registers what the stencil ops need besides kernels, as long as they are not in :mod:`voxelfield.ops._table`.

The schemas must exist for this, so everything is registered as soon as the library is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from voxelfield import _library
from voxelfield.foundation.autograd import below_autograd, functorch_active

F = TypeVar("F", bound=Callable[..., Any])
Rule = Callable[..., tuple[Any, Any]]

# How deeply torch.autograd may nest batched gradients of batched gradients.
_MAX_NESTING = 8

_fragment = torch.library.Library("voxelfield", "FRAGMENT")
_rules: dict[str, Rule] = {}


def fake(op: str) -> Callable[[F], F]:
    """Decorates the function that returns the results of a raw op for a compiler: shapes and dtypes without values."""

    def register(function: F) -> F:
        _library.when_loaded(lambda: torch.library.register_fake(f"voxelfield::{op}", function))
        return function

    return register


def register_autograd(op: str, apply: Callable[..., Any]) -> None:
    """Makes ``apply``, which takes the arguments of a raw op and applies a Function to them, its autograd kernel."""

    def kernel(*args: Any) -> Any:
        # torch.func calls this with one of its levels partly unwound, and then no Function can be applied.
        if functorch_active():
            raise NotImplementedError(
                f"torch.ops.voxelfield.{op} cannot be transformed by torch.func (grad, jvp, ...); the functions "
                "in voxelfield.ops can, outside of torch.compile(fullgraph=True)"
            )
        return apply(*args)

    _library.when_loaded(lambda: _fragment.impl(op, kernel, "Autograd"))


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
        info = SimpleNamespace(batch_size=size)
        arguments = pytree.tree_unflatten(plain, structure)
        result, result_dims = rule(info, pytree.tree_unflatten(dims, structure), *arguments)
        if isinstance(result, Tensor):
            return torch._add_batch_dim(result, result_dims, level)
        return [torch._add_batch_dim(x, dim, level) for x, dim in zip(result, result_dims, strict=True)]

    _rules[op] = rule
    _library.when_loaded(lambda: _fragment.impl(op, batch_gradients, "Batched"))


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


def _run_and_raise_versions(op: Callable[..., Any], places: list[int], *args: Any) -> Any:
    """Runs a raw op, and raises the version counters of the arguments at ``places``, as torch does for its own ops.

    Otherwise autograd would compute wrong gradients in silence from tensors that an op has overwritten since.
    """
    with below_autograd():
        result = op(*args)
    written = [x for place in places for x in (args[place] if isinstance(args[place], list) else [args[place]])]
    torch.autograd.graph.increment_version([x for x in written if x is not None])
    return result


_STENCIL_OPS = (
    "sample_trilinear",
    "sample_in_box",
    "splat_trilinear",
    "point_gradient_trilinear",
    "places_in_atlas",
    "share_copies_",
    "interpolate_cells",
    "splat_cells",
    "point_gradient_cells",
)


@_library.when_loaded
def _register() -> None:
    for name in _STENCIL_OPS:
        torch.library.register_vmap(f"voxelfield::{name}", partial(_map, name), lib=_fragment)
        op = getattr(torch.ops.voxelfield, name).default
        written = [i for i, x in enumerate(op._schema.arguments) if x.alias_info and x.alias_info.is_write]
        if written:
            _fragment.impl(name, partial(_run_and_raise_versions, op, written), "ADInplaceOrView")
