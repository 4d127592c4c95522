"""Handling of non-differentiable inputs: results do not require their gradient, and tangents are not silently lost."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from voxelfield.ops._autograd import functorch_active, is_mapped


def hold_constant(op: str, **inputs: Tensor | None) -> tuple[Any, ...]:
    """Returns the inputs, of which None stays, detached, so that they do not make results require a gradient.

    Raises:
        NotImplementedError: An input carries a tangent of forward-mode differentiation, or is mapped by ``torch.vmap``.
    """
    tensors = {name: x for name, x in inputs.items() if x is not None}
    if functorch_active() and any(map(is_mapped, tensors.values())):
        raise NotImplementedError(f"{op} cannot be mapped by torch.vmap: call it once with the inputs of all calls")
    # This covers torch.func too: its forward mode enters a level of torch.autograd.forward_ad.
    if forward_ad._current_level >= 0:
        for name, x in tensors.items():
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    f"{op} has no derivative in {name}, which must carry no tangent: pass {name}.detach()"
                )
    return tuple(x.detach() if x is not None and x.requires_grad else x for x in inputs.values())


def refuse_jvp(op: str) -> staticmethod[..., None]:
    """Returns a ``jvp`` for an autograd Function without forward mode: it raises an error that names the op."""

    def jvp(*_: object) -> None:
        raise NotImplementedError(f"{op} has no forward-mode derivative: differentiate in reverse mode")

    return staticmethod(jvp)


def refuse_vmap(op: str, remedy: str) -> staticmethod[..., None]:
    """Returns a ``vmap`` for an autograd Function that cannot be mapped: it raises an error that names the op."""

    def vmap(*_: object) -> None:
        raise NotImplementedError(f"{op} cannot be mapped by torch.vmap: {remedy}")

    return staticmethod(vmap)
