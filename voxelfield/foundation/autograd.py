"""Applies ops: eagerly, recorded by autograd, transformed by torch.func, or traced by a compiler; or refuses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling
from torch.jit import is_tracing

from voxelfield.foundation.private_torch import (
    forward_mode_level,
    functorch_active,
    is_dead_wrapper,
    is_mapped,
    unwrap_dead_wrappers,
)

MaybeTensor = Tensor | None


def traces_ops() -> bool:
    """Tells whether torch.compile or torch.jit is tracing; an autograd Function would hide the op from the trace."""
    return is_compiling() or is_tracing()


def forward_mode_active() -> bool:
    """Tells whether tensors may carry tangents."""
    return forward_mode_level() >= 0 or functorch_active()


def needs_long_path() -> bool:
    """Tells whether ops are traced or transformed, so that the fast path to the kernel must not be used."""
    return traces_ops() or forward_mode_active()


def to_record(inputs: Sequence[Any]) -> Sequence[Any] | None:
    """Returns inputs as autograd can record them, outside of ``torch.func``; None if none of them gets a gradient."""
    trained = False
    for x in inputs:
        if isinstance(x, Tensor) and x.requires_grad:
            if is_dead_wrapper(x):
                return unwrap_dead_wrappers(inputs)
            trained = True
    return inputs if trained else None


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
        if functorch_active() or forward_mode_level() >= 0:
            return cls.apply_transformed(*inputs)
        recorded = to_record(inputs) if torch.is_grad_enabled() else None
        return cls.forward(*inputs) if recorded is None else cls.record(*recorded)

    @classmethod
    def apply_transformed(cls, *inputs: Any) -> Any:
        """Applies the Function under ``torch.func`` or in forward mode."""
        return super().apply(*inputs) if functorch_active() else cls.record(*unwrap_dead_wrappers(inputs))


def hold_constant(op: str, **inputs: Tensor | None) -> tuple[Any, ...]:
    """Returns the inputs, of which None stays, detached, so that they do not make results require a gradient.

    Raises:
        NotImplementedError: An input carries a tangent of forward-mode differentiation, or is mapped by ``torch.vmap``.
    """
    tensors = {name: x for name, x in inputs.items() if x is not None}
    if functorch_active() and any(map(is_mapped, tensors.values())):
        raise NotImplementedError(f"{op} cannot be mapped by torch.vmap: call it once with the inputs of all calls")
    # This covers torch.func too: its forward mode enters a level of torch.autograd.forward_ad.
    if forward_mode_level() >= 0:
        for name, x in tensors.items():
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    f"{op} has no derivative in {name}, which must carry no tangent: pass {name}.detach()"
                )
    return tuple(x.detach() if x is not None and x.requires_grad else x for x in inputs.values())
