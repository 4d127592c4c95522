"""Every private symbol of torch on which ops rely, each with the reason why no public one serves.

A torch that renames one of them breaks this module alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad

# PyTorch's manual for custom operators calls the kernels below autograd in this way, in C++. torch.no_grad() would run
# the autograd kernel again. The second of the two dispatch keys that this guard excludes only tracks views: with it, a
# view returned by a Function could not be changed in place.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView

# Whether torch.func transforms the call: Function.apply asks the same, but tells nobody.
functorch_active = torch._C._are_functorch_transforms_active

# Whether a tensor is a wrapper of a call of torch.func that has returned, for unwrap_dead_wrappers below.
is_dead_wrapper = torch._C._functorch.is_dead_tensor_wrapper  # type: ignore[attr-defined]

# Autograd's own batches of gradients reach an op at the dispatch key Batched, for which torch has no public interface.
add_batch_dim = torch._add_batch_dim
remove_batch_dim = torch._remove_batch_dim


def kernel_of(overload: Any) -> Callable[..., Any]:
    """Returns the function in C++ that an overload of an op calls from a method in Python, which takes longer."""
    return overload._op


def forward_mode_level() -> int:
    """Returns how deeply forward-mode differentiation is nested, -1 for not at all.

    The public ``unpack_dual`` answers for one tensor, and takes longer than all other work of an op on the host.
    """
    return forward_ad._current_level


def unwrap_dead_wrappers(inputs: Iterable[Any]) -> list[Any]:
    """Returns inputs for autograd to record, without the wrappers of calls of ``torch.func`` that have returned.

    ``Function.apply`` does so too, after other steps; without it such inputs would get no gradient.
    """
    return [unwrap_if_dead(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]


def is_mapped(x: Tensor) -> bool:
    """Tells whether ``torch.vmap`` maps over a tensor, which may also be outside of ``torch.func.grad``.

    No public function looks into the wrappers of ``torch.func``.
    """
    wrappers = torch._C._functorch
    while wrappers.is_gradtrackingtensor(x):
        x = wrappers.get_unwrapped(x)
    return bool(wrappers.is_batchedtensor(x))
