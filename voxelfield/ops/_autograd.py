"""How an op is applied: at once, recorded by autograd, transformed by torch.func, or traced by a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

MaybeTensor = Tensor | None

# PyTorch's manual for custom operators calls the kernels below autograd in this way. The second of the two keys that
# this switches off only tracks views: a view that a Function returns could not be changed in place.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView

functorch_active = torch._C._are_functorch_transforms_active

_fragment = torch.library.Library("voxelfield", "FRAGMENT")


def traces_ops() -> bool:
    """Tells whether torch.compile or torch.jit is recording calls of ops: a Function would hide the op from them."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def forward_mode_active() -> bool:
    """Tells whether tensors may carry tangents."""
    return forward_ad._current_level >= 0 or functorch_active()


def needs_long_path() -> bool:
    """Tells whether an op is traced or transformed, so that the shortest way to its kernel would be wrong."""
    return traces_ops() or forward_mode_active()


class OpFunction(Function):
    """An autograd Function around one raw op, with as little work on the host as possible."""

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """Does what torch's ``apply`` does, but skips what a call has no use for.

        Without a gradient to record, the op runs directly. Otherwise inputs are not bound to a signature, which takes
        longer than all the rest; only ``torch.func`` needs that.
        """
        if functorch_active():
            return super().apply(*inputs)
        if not torch.is_grad_enabled() and forward_ad._current_level < 0:
            return cls.forward(*inputs)
        return cls.record(*inputs)

    @classmethod
    def record(cls, *inputs: Any) -> Any:
        """Applies the Function outside of ``torch.func``."""
        return super(Function, cls).apply(*inputs)  # type: ignore[misc]


def register_autograd(op: str, apply: Callable[..., Any]) -> None:
    """Makes autograd run a registered op by way of the Functions.

    Args:
        op: Name of the op.
        apply: Takes the op's arguments, applies one of the Functions to them, returns the op's result.
    """

    def kernel(*args: Any) -> Any:
        # torch.func calls this while one of its levels is half unwound, where no Function can be applied.
        if functorch_active():
            raise NotImplementedError(
                f"torch.ops.voxelfield.{op} cannot be transformed by torch.func (grad, jvp, ...); the functions "
                "in voxelfield.ops can, outside of torch.compile(fullgraph=True)"
            )
        return apply(*args)

    _fragment.impl(op, kernel, "Autograd")


def last_derivative(op: str, refusal: str) -> type[Function]:
    """Makes the Function of a backward op that has no derivative of its own.

    Args:
        op: Name of the op.
        refusal: Message of the NotImplementedError that asking for one raises.
    """

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
