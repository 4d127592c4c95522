"""Optimizers that do not import torch's compiler, which would take seconds.

Torch decorates methods of its optimizers so that torch.compile skips them; the decorators import the compiler at the
first call. Training compiles nothing, so these classes use the undecorated methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from voxelfield.grids.adam import GridAdam


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(method, "__wrapped__", method)


class _EagerMethods(torch.optim.Optimizer):
    """Mixin with undecorated methods; must come right before :class:`torch.optim.Optimizer` in the MRO."""

    add_param_group = _undecorated(torch.optim.Optimizer.add_param_group)
    state_dict = _undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = _undecorated(torch.optim.Optimizer.load_state_dict)
    zero_grad = _undecorated(torch.optim.Optimizer.zero_grad)


class EagerGridAdam(GridAdam, _EagerMethods):
    """A :class:`voxelfield.GridAdam` that does not import torch's compiler."""


class EagerAdamW(torch.optim.AdamW, _EagerMethods):
    """A :class:`torch.optim.AdamW` that does not import torch's compiler."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes a step."""
        _undecorated(torch.optim.AdamW.step)(self, closure)
