"""GridAdam: Adam for voxel grids in one pass over memory, optionally restricted to the occupied part of a scene."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from voxelfield.foundation.checks import (
    check_dtype,
    check_not_negative,
    check_same_device,
    check_tensor,
    is_divided,
    lies_within,
)
from voxelfield.foundation.errors import ArgumentValueError, shown
from voxelfield.grids.working_copies import is_current, mark_current, mark_managed
from voxelfield.ops._internal.optim import active_tiles, grid_adam_, grid_total_variation_grad_

# The options of a group that a step depends on, besides its learning rates.
RULE = ("betas", "eps", "weight_decay", "l2_penalty", "skip_untouched", "clear_grad")

MOMENTS = ("exp_avg", "exp_avg_sq")

MAX_BETA = 0.99
"""The largest of ``betas`` with moments in bfloat16. A change of less than half the distance of two numbers is rounded
away: with it, the second moment may stay up to a fifth below the gradients' square; with 0.95, up to a 25th."""


class GridAdam(torch.optim.Optimizer):
    r"""Adam or AdamW for grids (X, Y, Z, C): the steps of torch's optimizers, in one pass over memory.

    With gradient g (plus ``l2_penalty * param``) and step number t, a step computes
    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) g^2` and
    :math:`p \leftarrow (1 - \mathrm{lr} \cdot \mathrm{weight\_decay}) p - \mathrm{lr} \frac{m}{1 - \beta_1^t} /
    (\sqrt{v / (1 - \beta_2^t)} + \epsilon)`. It also updates the parameter's 16-bit working copy, if there is one, and
    clears the gradient. All grids of a group are updated together.

    Learning rates, step counts and lists of tiles are in device memory. A step therefore does not synchronise with the
    device, and a captured CUDA graph uses the values that these tensors have when it is replayed. Take one step before
    capturing, because the first step allocates the state.

    With ``channel_rates`` each channel has its own learning rate. Lower rates for the higher spherical harmonics help
    where few views tell these apart (3D Gaussian Splatting, Kerbl et al. 2023, trains all but the constant harmonic at
    1/20 of its rate).

    Under :class:`torch.amp.GradScaler` a step divides the scale out of the gradients. After an overflow it only clears
    them, outside of active tiles too. Neither synchronises with the device.

    A parameter has the state of :class:`torch.optim.Adam` (``step``, ``exp_avg``, ``exp_avg_sq``).
    :meth:`voxelfield.VoxelGrid.upsample` and ``crop`` resample it with the grid. Working copies and active tiles are
    not part of the state: set them again after resizing a grid and after loading a state.

    Args:
        params: Parameters or groups of them: float32, 4-D, contiguous. Groups may override every option.
        lr: Learning rate: a number, or a float32 tensor of one element on the parameters' device, which may be changed
            in place, also between replays of a captured graph.
        betas: Decay rates of the moments.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay (AdamW).
        l2_penalty: Factor of the parameter that is added to its gradient (``weight_decay`` of
            :class:`torch.optim.Adam`).
        channel_rates: (C,) float32 on the parameters' device, contiguous: a factor on the learning rate of each
            channel, finite and not negative. It also scales the channel's decay, as if each channel were a group. None
            means 1 for all channels. The tensor may be changed in place, also between replays of a captured graph.
        skip_untouched: Do not update a vertex, nor its moments, if the gradients of all its channels are exactly zero.
        bfloat16_moments: Store moments in bfloat16, rounded to nearest even; a step computes in float32.
        clear_grad: Set gradients to zero in the same pass, so that ``zero_grad()`` is not needed.

    Raises:
        TypeError: A parameter, ``channel_rates`` or a tensor ``lr`` is not float32.
        ValueError: A parameter is sharded or not (X, Y, Z, C) and contiguous, ``channel_rates`` or ``lr`` has another
            shape or device, or an option is out of range, such as ``betas`` of more than :data:`MAX_BETA` with
            ``bfloat16_moments``.
    """

    # GradScaler then sets `grad_scale` and `found_inf` during `step`, instead of skipping the step on the host.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        weight_decay: float = 0.0,
        l2_penalty: float = 0.0,
        channel_rates: Tensor | None = None,
        skip_untouched: bool = False,
        bfloat16_moments: bool = False,
        clear_grad: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "l2_penalty": l2_penalty,
            "channel_rates": channel_rates,
            "skip_untouched": skip_untouched,
            "bfloat16_moments": bfloat16_moments,
            "clear_grad": clear_grad,
            "capturable": True,  # makes load_state_dict put step counts on the device
        }
        # For each restricted parameter, its resolution, and the ids and the count of its active tiles.
        self._active: dict[Tensor, tuple[tuple[int, ...], Tensor, Tensor]] = {}
        self._working: dict[Tensor, Tensor] = {}
        self._touched: dict[Tensor, Tensor] = {}  # for the next step only
        self._rates: dict[tuple[int, torch.device], tuple[float, Tensor]] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in ("_active", "_working", "_touched", "_rates"):
            self.__dict__.setdefault(name, {})  # a copied or unpickled optimizer does not have these yet

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, as :class:`torch.optim.Optimizer` does; moments in the dtype of its groups."""
        # Torch would give them the dtype of the parameters, all at once.
        whole = state_dict["state"]
        rest = {key: {name: x for name, x in state.items() if name not in MOMENTS} for key, state in whole.items()}
        present = [group["channel_rates"] for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": rest})
        for group, saved, rates in zip(self.param_groups, state_dict["param_groups"], present, strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                for name, value in whole.get(key, {}).items():
                    if name in MOMENTS:
                        self.state[param][name] = value.to(param.device, moments_of(group), copy=True)
            if group["channel_rates"] is not None and group["params"]:
                group["channel_rates"] = group["channel_rates"].to(group["params"][0].device)
                _check_channel_rates(group)
                if rates is not None:
                    # Captured graphs and the caller refer to this tensor, so it is overwritten, not replaced.
                    group["channel_rates"] = rates.copy_(group["channel_rates"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as :class:`torch.optim.Optimizer` does, and checks its parameters and options."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        betas = group["betas"]
        two = isinstance(betas, (tuple, list)) and len(betas) == 2
        if not (two and all(lies_within("betas", beta, 0, 1) and beta < 1 for beta in betas)):
            raise ValueError(f"betas must be two numbers in [0, 1), got {shown(betas)}")
        if group["bfloat16_moments"] and max(betas) > MAX_BETA:
            raise ArgumentValueError(f"betas must be at most {MAX_BETA:g} with bfloat16_moments, got {tuple(betas)}")
        for name in ("eps", "weight_decay", "l2_penalty"):
            check_not_negative(name, group[name])
        _check_rate(group)
        for param in group["params"]:
            if is_divided(param):
                raise ArgumentValueError(
                    f"params must be whole, got a DTensor of shape {tuple(param.shape)}: for a grid that fully_shard "
                    "manages, use torch.optim.Adam, or name them in its ignored_params and all-reduce their gradient"
                )
            check_tensor("params", param, ("X", "Y", "Z", "C"))
            check_dtype("params", param, (torch.float32,), " (16-bit grids are working copies: see set_working)")
            if not param.is_contiguous():
                raise ValueError(f"params must be contiguous, got strides {param.stride()}")
        _check_channel_rates(group)

    def set_active(self, param: Tensor, occupied: Tensor | None) -> None:
        """Restricts updates of a parameter to the tiles of vertices that a sample in an occupied cell can read.

        A tile is 4 x 4 x 8 vertices along x, y, z. Vertices outside the listed tiles are not updated from then on, and
        their gradients are neither used nor cleared. A second call for the same resolution writes into the same
        buffers without synchronising with the device, so captured graphs use the new list.

        On CUDA a step takes half as long again if the rows of the grid along z are not multiples of 128 bytes: with 4
        channels, choose a number of vertices along z that is a multiple of 8.

        Args:
            param: A parameter of this optimizer.
            occupied: (X, Y, Z) bool, cells that divide the grid's box evenly, on the parameter's device; None removes
                the restriction.

        Raises:
            TypeError: ``occupied`` is not bool.
            ValueError: ``occupied`` has the wrong shape or device, or ``param`` is not a parameter of this optimizer.
        """
        self._check_trained(param)
        if occupied is None:
            self._active.pop(param, None)
            return
        check_tensor("occupied", occupied, ("X", "Y", "Z"))
        check_same_device("occupied", occupied, "param", param)
        resolution, present = tuple(param.shape[:3]), self._active.get(param)
        if present is not None and present[0] == resolution:
            active_tiles(occupied, resolution, out=present[1:])
        else:
            self._active[param] = (resolution, *active_tiles(occupied, resolution))

    def active_tiles(self, param: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the ids and the count of the tiles that are updated; None if the whole grid is updated."""
        return self._active[param][1:] if param in self._active else None

    @torch.no_grad()
    def set_working(self, param: Tensor, working: Tensor | None) -> None:
        """Sets the 16-bit copy of a parameter that every step updates, and rounds the parameter into it now.

        Args:
            param: A parameter of this optimizer.
            working: A float16 or bfloat16 tensor of the parameter's shape and device, contiguous; None removes the
                copy.

        Raises:
            TypeError: ``working`` has another dtype.
            ValueError: ``working`` has another shape or device or is not contiguous, or ``param`` is not a parameter of
                this optimizer.
        """
        self._check_trained(param)
        if working is None:
            previous = self._working.pop(param, None)
            if previous is not None:
                mark_managed(previous, False)
            return
        check_tensor("working", working, tuple(param.shape), " as param has")
        check_dtype("working", working, (torch.float16, torch.bfloat16))
        check_same_device("working", working, "param", param)
        if not working.is_contiguous():
            raise ValueError(f"working must be contiguous, got strides {working.stride()}")
        self.set_working(param, None)
        self._working[param] = working.copy_(param)
        mark_current(working, param)
        mark_managed(working, True)

    def set_touched(self, param: Tensor, table: Tensor) -> None:
        """Names the vertices of a parameter that the next step updates, so that it need not read all gradients.

        For a parameter of a group with ``skip_untouched`` that is not restricted to active tiles.

        Args:
            param: A parameter of this optimizer.
            table: (K, 5) int32, as :func:`voxelfield.ops._internal.optim.touched_vertices` writes it without ids: all
                vertices whose gradient is not zero.
        """
        self._check_trained(param)
        if param in self._active:
            raise ArgumentValueError("param must not be restricted to active tiles where touched vertices are named")
        self._touched[param] = table

    def add_total_variation(
        self, param: Tensor, weights: Tensor | float | Sequence[float], *, delta: float | None = None
    ) -> None:
        r"""Adds the gradient of the total variation to a parameter's gradient, in the tiles that are updated.

        The total variation is defined by :meth:`voxelfield.VoxelGrid.total_variation`. With ``delta`` the squared
        difference :math:`d^2` of two neighbours is replaced by twice its Huber loss (Huber 1964): :math:`d^2` up to
        :math:`|d| = \delta` and :math:`2 \delta |d| - \delta^2` beyond, which preserves edges.

        Args:
            param: A parameter of this optimizer that has a gradient.
            weights: The weights of x, y and z: a (3,) float32 tensor on the parameter's device, which a captured CUDA
                graph reads when it is replayed; three numbers; or one number for all axes.
            delta: Difference between neighbours above which the penalty is linear; None makes it quadratic everywhere.

        Raises:
            TypeError: ``weights`` is not float32.
            ValueError: The parameter has no gradient or was resized since :meth:`set_active`, ``weights`` has another
                shape or device, or ``delta`` is not positive.
        """
        self._check_trained(param)
        if param.grad is None:
            raise ValueError("param must have a gradient to add to, but its grad is None")
        ids, count = self._tiles(param)
        grid_total_variation_grad_(param.grad, param, weights, delta=delta, tiles=ids, tile_count=count)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step for every parameter that has a gradient.

        Args:
            closure: Recomputes the loss and the gradients; None if the gradients are up to date.

        Returns:
            The loss that ``closure`` returned; None without a closure.

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
            rule = (tuple(group["betas"]), *(group[key] for key in RULE[1:]))
            for param in group["params"]:
                if param.grad is not None:
                    self._start(param, group)
                    rate = self._rate(index, param.device)
                    batches.setdefault((param.device, *rule), []).append((param, rate, group["channel_rates"]))
        touched, self._touched = self._touched, {}
        for key, levels in batches.items():
            self._step_together(dict(zip(RULE, key[1:], strict=True)), levels, touched)
        return loss

    def _step_together(
        self, rule: dict[str, Any], levels: list[tuple[Tensor, Tensor, Tensor | None]], touched: Mapping[Tensor, Tensor]
    ) -> None:
        params = [param for param, _, _ in levels]
        states = [self.state[param] for param in params]
        steps = [state["step"] for state in states]
        tiles = [self._tiles(param) for param in params]
        working = [self._working_copy(param) for param in params]
        # Other copies stay out of date, because a step may update only some vertices.
        followed = [
            (copy, param)
            for copy, param in zip(working, params, strict=True)
            if copy is not None and is_current(copy, param)
        ]
        grad_scale, found_inf = (self._from_scaler(name, params[0].device) for name in ("grad_scale", "found_inf"))
        if found_inf is None:
            torch._foreach_add_(steps, 1)
        else:  # a tensor per step: a single one would be read by the host
            torch._foreach_add_(steps, [(found_inf == 0).to(torch.float32)] * len(steps))
        grid_adam_(
            params,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [param.grad for param in params if param.grad is not None],
            [rate for _, rate, _ in levels],
            steps,
            working=working,
            tiles=[ids for ids, _ in tiles],
            tile_counts=[count for _, count in tiles],
            touched=[touched.get(param) for param in params],
            channel_rates=[rates for _, _, rates in levels],
            grad_scale=grad_scale,
            found_inf=found_inf,
            **rule,
        )
        for copy, param in followed:
            mark_current(copy, param)

    def _from_scaler(self, name: str, device: torch.device) -> Tensor | None:
        value: Tensor | None = getattr(self, name, None)
        return None if value is None else value.to(device, torch.float32).reshape(())

    def _start(self, param: Tensor, group: dict[str, Any]) -> None:
        if self.state[param]:
            return
        if _is_capturing(param.device):
            raise RuntimeError(
                "GridAdam must have taken a step before one is captured, because the first step allocates its state"
            )
        self.state[param] |= new_state(param, moments_of(group))

    def _rate(self, index: int, device: torch.device) -> Tensor:
        """Returns a group's learning rate on a device; not updated during capture, which would record the value."""
        lr = self.param_groups[index]["lr"]
        if isinstance(lr, Tensor):
            return lr
        uploaded, rate = self._rates.get((index, device), (None, None))
        if rate is None or (uploaded != lr and not _is_capturing(device)):
            rate = torch.full((1,), lr, dtype=torch.float32, device=device) if rate is None else rate.fill_(lr)
            self._rates[index, device] = lr, rate
        return rate

    def _tiles(self, param: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if param not in self._active:
            return None, None
        resolution, ids, count = self._active[param]
        _check_not_resized("active tiles", resolution, tuple(param.shape[:3]), "set_active")
        return ids, count

    def _working_copy(self, param: Tensor) -> Tensor | None:
        working = self._working.get(param)
        if working is not None:
            _check_not_resized("working copy", tuple(working.shape), tuple(param.shape), "set_working")
        return working

    def _check_trained(self, param: Tensor) -> None:
        if not any(trained is param for group in self.param_groups for trained in group["params"]):
            raise ValueError("param must be a parameter of this optimizer, but is in none of its groups")


def moments_of(group: Mapping[str, Any]) -> torch.dtype:
    """Returns the dtype of the moments of a group's parameters."""
    return torch.bfloat16 if group["bfloat16_moments"] else torch.float32


def new_state(param: Tensor, moments: torch.dtype) -> dict[str, Tensor]:
    """Returns the state before the first step of a parameter or a part of it, with moments of a dtype."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
    return state | {name: torch.zeros_like(param.detach(), dtype=moments) for name in MOMENTS}


def sum_weights(grid: Tensor, weight: float) -> list[float]:
    """Returns the weights of :meth:`GridAdam.add_total_variation` by which it is a weighted sum instead of means."""
    x, y, z, channels = grid.shape
    return [weight * channels * pairs for pairs in ((x - 1) * y * z, x * (y - 1) * z, x * y * (z - 1))]


def _check_rate(group: dict[str, Any]) -> None:
    """Raises unless a group's learning rate is a number, or a tensor of one number."""
    rate = group["lr"]
    if not isinstance(rate, Tensor):
        check_not_negative("lr", rate)
        return
    check_dtype("lr", rate, (torch.float32,))
    if rate.numel() != 1:
        raise ArgumentValueError(f"lr must be a number or a tensor of one element, got shape {tuple(rate.shape)}")
    for param in group["params"][:1]:
        if not param.is_meta:  # its values will be allocated later, on a device that is not known here
            check_same_device("lr", rate, "params", param)


def _check_channel_rates(group: dict[str, Any]) -> None:
    rates = group["channel_rates"]
    if rates is None:
        return
    for param in group["params"]:
        check_tensor("channel_rates", rates, (param.shape[3],), f" for params of shape {tuple(param.shape)}")
        check_dtype("channel_rates", rates, (torch.float32,))
        check_same_device("channel_rates", rates, "params", param)
        if not rates.is_contiguous():
            raise ValueError(f"channel_rates must be contiguous, got strides {rates.stride()}")
    if not bool((rates.isfinite() & (rates >= 0)).all()):
        raise ValueError(f"channel_rates must be finite and not negative, got {rates.tolist()}")


def _check_not_resized(what: str, size: tuple[int, ...], present: tuple[int, ...], method: str) -> None:
    if size != present:
        raise ValueError(
            f"{what} must have the parameter's size {present}, got {size}: call {method} again after a grid is resized"
        )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
