"""GridAdam: Adam for voxel grids, fused, and restricted to where a scene has something."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from voxelfield.ops._checks import check_dtype, check_same_device, check_tensor
from voxelfield.ops.blocks import active_blocks
from voxelfield.ops.grid_adam import check_channel_rates, check_rule, grid_adam_
from voxelfield.ops.total_variation import grid_total_variation_grad_

__all__ = ["GridAdam"]


class _Active:
    """The blocks of a parameter's vertices that are updated, for the resolution that it had then."""

    def __init__(self, occupied: Tensor, resolution: tuple[int, ...]) -> None:
        self.resolution = resolution
        self.ids, self.count = active_blocks(occupied, resolution)

    def update(self, occupied: Tensor) -> None:
        active_blocks(occupied, self.resolution, out=(self.ids, self.count))


class GridAdam(torch.optim.Optimizer):
    """Adam or AdamW for grids (X, Y, Z, C), the same steps as torch's, in one pass over memory.

    A step updates the moments, the parameter, and its 16-bit working copy if it has one, and clears the gradient, for
    all grids of a group together; see :func:`voxelfield.ops.grid_adam_` for the equations. Learning rates, step counts
    and lists of blocks are on the device: a step never waits for it, and a CUDA graph that captured one follows their
    changes. Take one step before capturing, to have the state allocated.

    Channels need not learn alike: with ``channel_rates`` each has its share of the learning rate. This can hold back
    harmonics of colour, which few views tell from one another (3D Gaussian Splatting, Kerbl et al. 2023, trains all but
    the constant one at 1/20 of its rate).

    The state of a parameter is that of :class:`torch.optim.Adam` (``step``, ``exp_avg``, ``exp_avg_sq``), and follows
    the grid through :meth:`voxelfield.VoxelGrid.upsample` and ``crop``. Working copies and active blocks are not
    part of it: set them anew after that, and after loading.

    Args:
        params: Parameters or groups of them: float32, 4-D, contiguous. Groups may override every option.
        lr: Learning rate: a number, or one float32 on the parameters' device, to be changed in place.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        decay: Decoupled weight decay (AdamW).
        l2: Weight decay by way of the gradient (Adam's ``weight_decay``).
        channel_rates: (C,) float32 on the parameters' device, contiguous: a factor on the learning rate for each
            channel, finite and not negative, decay included (as if each channel had a group of its own); None for
            ones. To be changed in place, which captured graphs follow.
        skip_untouched: Leave vertices alone, moments too, whose gradient is exactly zero.
        clear_grad: Set gradients to zero in the same pass, which makes ``zero_grad()`` needless.

    Raises:
        TypeError: A parameter or ``channel_rates`` is not float32.
        ValueError: A parameter is not (X, Y, Z, C) and contiguous, ``channel_rates`` has another shape or device,
            or an option is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        decay: float = 0.0,
        l2: float = 0.0,
        channel_rates: Tensor | None = None,
        skip_untouched: bool = False,
        clear_grad: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "decay": decay, "l2": l2, "channel_rates": channel_rates}
        # `capturable` has load_state_dict put step counts on the device.
        flags = {"skip_untouched": skip_untouched, "clear_grad": clear_grad, "capturable": True}
        self._active: dict[Tensor, _Active] = {}
        self._working: dict[Tensor, Tensor] = {}
        self._rates: dict[tuple[int, torch.device], tuple[float, Tensor]] = {}
        super().__init__(params, {**options, **flags})

    def __setstate__(self, state: dict[str, Any]) -> None:
        present = [group["channel_rates"] for group in self.__dict__.get("param_groups", [])]
        super().__setstate__(state)
        for name in ("_active", "_working", "_rates"):
            self.__dict__.setdefault(name, {})  # a copy of an optimizer starts without
        for group, own in itertools.zip_longest(self.param_groups, present):
            rates = group.setdefault("channel_rates", own)  # which older states have not
            if rates is None:
                continue
            for param in group["params"][:1]:
                group["channel_rates"] = rates.to(param.device)  # it was saved from another, perhaps
            _check_channel_rates(group)
            if own is not None:
                # Graphs and whoever made it hold on to the tensor.
                group["channel_rates"] = own.copy_(rates)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as of :class:`torch.optim.Optimizer`, after checking its parameters and options."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_rule(group["betas"], group["eps"], group["decay"], group["l2"])
        if not isinstance(group["lr"], Tensor) and not group["lr"] >= 0:
            raise ValueError(f"lr must not be negative, got {group['lr']}")
        for param in group["params"]:
            check_tensor("params", param, ("X", "Y", "Z", "C"))
            check_dtype("params", param, (torch.float32,), " (16-bit grids are working copies: see set_working)")
            if not param.is_contiguous():
                raise ValueError(f"params must be contiguous, got strides {param.stride()}")
        _check_channel_rates(group)

    def set_active(self, param: Tensor, occupied: Tensor | None) -> None:
        """Restricts updates of a parameter to blocks of vertices that samples in occupied cells can touch.

        Outside of them nothing changes from then on, and gradients are neither used nor cleared. Called again for the
        same resolution, it writes into the same buffers, without waiting for the device, and captured graphs follow.

        On CUDA a step is half as long again where the rows of the grid are not whole 128-byte lines: with 4 channels,
        choose a number of vertices along z that is a multiple of 8.

        Args:
            param: A parameter of this optimizer.
            occupied: (X, Y, Z) bool, cells that divide the grid's box evenly, on the parameter's device; None lifts the
                restriction.

        Raises:
            TypeError: ``occupied`` is not bool.
            ValueError: ``occupied`` has the wrong shape or device, or the optimizer does not hold ``param``.
        """
        self._check_held(param)
        if occupied is None:
            self._active.pop(param, None)
            return
        check_tensor("occupied", occupied, ("X", "Y", "Z"))
        check_same_device("occupied", occupied, "param", param)
        resolution, present = tuple(param.shape[:3]), self._active.get(param)
        if present is not None and present.resolution == resolution:
            present.update(occupied)
        else:
            self._active[param] = _Active(occupied, resolution)

    def active_blocks(self, param: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the ids and the count of the blocks that are updated, None if that is the whole grid."""
        active = self._active.get(param)
        return None if active is None else (active.ids, active.count)

    @torch.no_grad()
    def set_working(self, param: Tensor, working: Tensor | None) -> None:
        """Names the 16-bit copy of a parameter that each step keeps up to date, and rounds the parameter into it.

        Args:
            param: A parameter of this optimizer.
            working: Its shape and device, float16 or bfloat16, contiguous; None for none.

        Raises:
            TypeError: ``working`` has another dtype.
            ValueError: It has another shape or device, is not contiguous, or the optimizer does not hold ``param``.
        """
        self._check_held(param)
        if working is None:
            self._working.pop(param, None)
            return
        check_tensor("working", working, tuple(param.shape), " as param has")
        check_dtype("working", working, (torch.float16, torch.bfloat16))
        check_same_device("working", working, "param", param)
        if not working.is_contiguous():
            raise ValueError(f"working must be contiguous, got strides {working.stride()}")
        working.copy_(param)
        self._working[param] = working

    def add_total_variation(
        self, param: Tensor, weights: Tensor | float | Sequence[float], *, delta: float | None = None
    ) -> None:
        """Adds the gradient of the total variation to a parameter's gradient, in the blocks that are updated.

        Args:
            param: A parameter of this optimizer that has a gradient.
            weights: As for :func:`voxelfield.ops.grid_total_variation_grad_`.
            delta: As there.

        Raises:
            TypeError: ``weights`` is not float32.
            ValueError: The parameter has no gradient, was resized since :meth:`set_active`, or an argument is as that
                function refuses it.
        """
        self._check_held(param)
        if param.grad is None:
            raise ValueError("param must have a gradient to add to, but its grad is None")
        ids, count = self._blocks(param)
        grid_total_variation_grad_(param.grad, param, weights, delta=delta, blocks=ids, block_count=count)

    def update_rates(self) -> None:
        """Brings learning rates that are plain numbers to the device; :meth:`step` does so by itself.

        To be called before a captured graph is replayed, if a rate has changed. Does not wait for the device.
        """
        for index, group in enumerate(self.param_groups):
            for device in {param.device for param in group["params"]}:
                self._rate(index, device, upload=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step for every parameter that has a gradient.

        Args:
            closure: Computes the loss and the gradients anew, if given.

        Returns:
            What ``closure`` returns, else None.

        Raises:
            ValueError: A parameter was resized since :meth:`set_active` or :meth:`set_working`.
            RuntimeError: A graph is being captured and a parameter has no state yet.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        for index, group in enumerate(self.param_groups):
            rule = (*group["betas"], *(group[k] for k in ("eps", "decay", "l2", "skip_untouched", "clear_grad")))
            for param in group["params"]:
                if param.grad is not None:
                    rate = self._rate(index, param.device, upload=not _is_capturing(param.device))
                    batches.setdefault((param.device, *rule), []).append((param, rate, group["channel_rates"]))
        for key, levels in batches.items():
            self._step_together(key[1:], levels)
        return loss

    def _step_together(self, rule: tuple[Any, ...], levels: list[tuple[Tensor, Tensor, Tensor | None]]) -> None:
        beta1, beta2, eps, decay, l2, skip_untouched, clear_grad = rule
        params = [param for param, _, _ in levels]
        states = [self._state(param) for param in params]
        steps = [state["step"] for state in states]
        blocks = [self._blocks(param) for param in params]
        working = [self._working_copy(param) for param in params]
        torch._foreach_add_(steps, 1)
        grid_adam_(
            params,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [param.grad for param in params if param.grad is not None],
            [rate for _, rate, _ in levels],
            steps,
            working=working,
            blocks=[ids for ids, _ in blocks],
            block_counts=[count for _, count in blocks],
            channel_rates=[shares for _, _, shares in levels],
            betas=(beta1, beta2),
            eps=eps,
            decay=decay,
            l2=l2,
            skip_untouched=skip_untouched,
            clear_grad=clear_grad,
        )

    def _state(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            if _is_capturing(param.device):
                raise RuntimeError("GridAdam must have taken a step before one is captured: its state is made then")
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state

    def _rate(self, index: int, device: torch.device, upload: bool) -> Tensor:
        lr = self.param_groups[index]["lr"]
        if isinstance(lr, Tensor):
            return lr
        held, rate = self._rates.get((index, device), (None, None))
        if rate is None:
            rate = torch.full((1,), lr, dtype=torch.float32, device=device)
        elif upload and held != lr:
            rate.fill_(lr)
        else:
            return rate
        self._rates[index, device] = lr, rate
        return rate

    def _blocks(self, param: Tensor) -> tuple[Tensor | None, Tensor | None]:
        active = self._active.get(param)
        if active is None:
            return None, None
        if active.resolution != tuple(param.shape[:3]):
            raise ValueError(
                f"a parameter's active blocks are those of resolution {active.resolution}, but it has "
                f"{tuple(param.shape[:3])} now: call set_active again after a grid is resized"
            )
        return active.ids, active.count

    def _working_copy(self, param: Tensor) -> Tensor | None:
        working = self._working.get(param)
        if working is not None and working.shape != param.shape:
            raise ValueError(
                f"a parameter's working copy has shape {tuple(working.shape)}, but it has {tuple(param.shape)} now: "
                "call set_working again after a grid is resized"
            )
        return working

    def _check_held(self, param: Tensor) -> None:
        if not any(held is param for group in self.param_groups for held in group["params"]):
            raise ValueError("param must be a parameter of this optimizer, but none of its groups holds it")


def _check_channel_rates(group: dict[str, Any]) -> None:
    rates = group["channel_rates"]
    if rates is None:
        return
    for param in group["params"]:
        check_channel_rates("channel_rates", rates, "params", param)
    if not bool((rates.isfinite() & (rates >= 0)).all()):
        raise ValueError(f"channel_rates must be finite and not negative, got {rates.tolist()}")


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
