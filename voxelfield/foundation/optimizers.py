"""Torch's optimizers without the import of its compiler, their learning rates, and the loading of their state.

Torch decorates methods of its optimizers so that torch.compile skips them; the decorators import the compiler at the
first call, which takes seconds. Training compiles nothing, so its optimizers use the undecorated methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of one of torch's optimizers without the decorator by which torch.compile skips it."""
    return getattr(method, "__wrapped__", method)


class EagerMethods(torch.optim.Optimizer):
    """Mixin with undecorated methods; must come right before :class:`torch.optim.Optimizer` in the MRO."""

    add_param_group = undecorated(torch.optim.Optimizer.add_param_group)
    state_dict = undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = undecorated(torch.optim.Optimizer.load_state_dict)
    zero_grad = undecorated(torch.optim.Optimizer.zero_grad)


class EagerAdamW(torch.optim.AdamW, EagerMethods):
    """A :class:`torch.optim.AdamW` that does not import torch's compiler."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes a step."""
        undecorated(torch.optim.AdamW.step)(self, closure)


def exponential_decay(step: Tensor, steps: int, final: float, cooldown: float = 0.0) -> Tensor:
    """Returns the factor on the learning rate, on the device of ``step``.

    It falls exponentially from 1 at step 0 to ``final`` at step ``steps``. Over the last ``cooldown`` of the steps, a
    share from 0 to 1, it is also multiplied by a factor that falls linearly from 1 to 0, which averages out the noise
    of the last steps as a mean of the parameters would, without a copy of them (Haegele et al. 2024, "Scaling laws and
    compute-optimal training beyond fixed training durations").
    """
    factor: Tensor = final ** (step / steps)
    return factor if cooldown == 0 else factor * ((steps - step) / (cooldown * steps)).clamp(max=1)


def load_moments(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
    """Loads moments and step counts, the entry ``state`` of a state dict, into an optimizer; its settings stay."""
    own = optimizer.state_dict()["param_groups"]
    # Tensors, which may change later; loading copies them.
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": own})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
