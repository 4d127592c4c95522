"""Methods of torch's optimizers that do not import its compiler.

Torch decorates methods of its optimizers so that torch.compile skips them; the decorators import the compiler at the
first call, which takes seconds. Training compiles nothing, so its optimizers use the undecorated methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of one of torch's optimizers without the decorator by which torch.compile skips it."""
    return getattr(method, "__wrapped__", method)


class EagerMethods(torch.optim.Optimizer):
    """Mixin with undecorated methods; must come right before :class:`torch.optim.Optimizer` in the MRO."""

    add_param_group = undecorated(torch.optim.Optimizer.add_param_group)
    state_dict = undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = undecorated(torch.optim.Optimizer.load_state_dict)
    zero_grad = undecorated(torch.optim.Optimizer.zero_grad)
