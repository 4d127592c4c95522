"""Applies ops: eagerly, recorded by autograd, transformed by torch.func, or traced by a compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from voxelfield import _library

MaybeTensor = Tensor | None

# PyTorch's manual for custom operators calls the kernels below autograd in this way. The second of the two dispatch
# keys that this guard excludes only tracks views: with it, a view returned by a Function could not be changed in place.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView

functorch_active = torch._C._are_functorch_transforms_active

_fragment = torch.library.Library("voxelfield", "FRAGMENT")


def traces_ops() -> bool:
    """Tells whether torch.compile or torch.jit is tracing; an autograd Function would hide the op from the trace."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def forward_mode_active() -> bool:
    """Tells whether tensors may carry tangents."""
    return forward_ad._current_level >= 0 or functorch_active()


def needs_long_path() -> bool:
    """Tells whether ops are traced or transformed, so that the fast path to the kernel must not be used."""
    return traces_ops() or forward_mode_active()


class OpFunction(Function):
    """An autograd Function around one raw op, with as little host overhead as possible.

    Attributes:
        record: Applies the Function and records it, outside of ``torch.func``. It is torch's own ``apply``, bound once
            for each subclass, because torch 2.14 cannot trace ``super`` of a Function.
    """

    record: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.record = super(Function, cls).apply  # type: ignore[misc]

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """Does the same as torch's ``apply``, without the steps that the call does not need.

        If no gradient is recorded, the op runs directly. Otherwise the inputs are not bound to the signature of
        ``forward``: only ``torch.func`` needs that, and it takes longer than everything else.
        """
        if functorch_active():
            return super().apply(*inputs)
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:
            return cls.forward(*inputs)
        return cls.record(*inputs)


def raw_ops() -> list[str]:
    """Returns the names of all raw ops, once the library is loaded."""
    names = torch._C._dispatch_get_all_op_names()
    return [name.removeprefix("voxelfield::") for name in names if name.startswith("voxelfield::")]


def is_mapped(x: Tensor) -> bool:
    """Tells whether ``torch.vmap`` maps over a tensor, which may also be outside of ``torch.func.grad``."""
    wrappers = torch._C._functorch
    while wrappers.is_gradtrackingtensor(x):
        x = wrappers.get_unwrapped(x)
    return bool(wrappers.is_batchedtensor(x))


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

    _fragment.impl(op, kernel, "Autograd")


def last_derivative(op: str, refusal: str) -> type[Function]:
    """Makes the Function of a backward op whose own derivative raises NotImplementedError with this message."""

    class LastDerivative(OpFunction):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            with below_autograd():
                return getattr(torch.ops.voxelfield, op).default(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> None:
            raise NotImplementedError(refusal)

        @staticmethod
        def jvp(ctx: Any, *tangents: MaybeTensor) -> None:
            raise NotImplementedError(refusal)

        @staticmethod
        def vmap(*_: object) -> None:
            raise NotImplementedError(f"{op} cannot be mapped by torch.vmap")

    return LastDerivative


def _run_and_raise_versions(op: Callable[..., Any], places: list[int], *args: Any) -> Any:
    """Runs a raw op, and raises the version counters of the arguments at ``places``, as torch does for its own ops.

    Otherwise autograd would compute wrong gradients in silence from tensors that an op has overwritten since.
    """
    with below_autograd():
        result = op(*args)
    written = [x for place in places for x in (args[place] if isinstance(args[place], list) else [args[place]])]
    torch.autograd.graph.increment_version([x for x in written if x is not None])
    return result


@_library.when_loaded
def _register() -> None:
    for name in raw_ops():
        op = getattr(torch.ops.voxelfield, name).default
        written = [i for i, x in enumerate(op._schema.arguments) if x.alias_info and x.alias_info.is_write]
        if written:
            _fragment.impl(name, partial(_run_and_raise_versions, op, written), "ADInplaceOrView")
