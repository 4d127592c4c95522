"""Adam over grids and networks, with learning rates that live on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from voxelfield.fields.field import RadianceField
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.training.config import OptimizerConfig, RatesConfig
from voxelfield.training.eager import EagerAdamW, EagerGridAdam

# Vertices from which it pays to update only those that matter.
_WORTH_LISTING = 1 << 17


def copies_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of what grids are read from: float16 copies where ``trainer.precision`` is narrow, on CUDA."""
    return torch.float16 if device.type == "cuda" and precision != "float32" else torch.float32


class Optimizers:
    """GridAdam for a field's grids, fused AdamW for its decoder's network, if it has one.

    Nothing that a step does waits for the device, so that a CUDA graph can hold it.

    Args:
        field: What is trained.
        config: Rates and constants that the field asks for.
        rates: Those that the length of the run asks for.

    Attributes:
        grid: The grids' optimizer: the one to hand over when a grid changes its resolution or box.
        network: The network's, or None.

    Raises:
        ValueError: ``config.view_lr_factor`` is not 1, but the decoder has no channels for the viewing direction alone.
    """

    def __init__(self, field: RadianceField, config: OptimizerConfig, rates: RatesConfig) -> None:
        self._field = field
        device = field.aabb.device
        grids = field.grid.levels
        self._undecayed = torch.tensor(
            [rates.grid * config.grid_lr, rates.network * config.network_lr], dtype=torch.float32, device=device
        )
        self._decayed = self._undecayed.clone()
        # Views: each optimizer follows its own number.
        self._lrs = self._decayed.split(1)
        self.grid = EagerGridAdam(
            grids,
            lr=self._lrs[0],
            betas=rates.betas,
            eps=config.eps,
            decay=config.grid_decay,
            channel_rates=_channel_rates(field, config.view_lr_factor),
            skip_untouched=config.skip_untouched,
        )
        of_grids = {id(parameter) for parameter in grids}
        network = [parameter for parameter in field.parameters() if id(parameter) not in of_grids]
        self.network = (
            EagerAdamW(
                network,
                lr=self._lrs[1],
                betas=rates.betas,
                eps=config.eps,
                weight_decay=config.network_decay,
                fused=True,
                capturable=device.type == "cuda",
            )
            if network
            else None
        )

    def attach(self, dtype: torch.dtype, occupancy: OccupancyGrid) -> None:
        """Lets the field sample copies of its grids and sum gradients in place; to be called after any change of them.

        Args:
            dtype: Of the copies.
            occupancy: Only what samples in occupied cells can touch is updated.
        """
        copies = self._field.grid.keep_copies(dtype)
        for parameter, copy in zip(self._active_levels(), copies, strict=True):
            self.grid.set_working(parameter, copy if dtype != torch.float32 else None)
        self.restrict(occupancy)

    def restrict(self, occupancy: OccupancyGrid) -> None:
        """Follows a change of what is occupied, within the same resolutions and box."""
        for parameter in self._active_levels():
            # Updating a whole small grid is faster than listing its active tiles.
            if parameter[..., 0].numel() >= _WORTH_LISTING:
                # Total variation also adds gradients outside the tiles, which no later step must use.
                if parameter.grad is not None:
                    parameter.grad.zero_()
                self.grid.set_active(parameter, occupancy.occupied)
            else:
                self.grid.set_active(parameter, None)

    @torch.no_grad()
    def scale(self, factor: Tensor | float) -> None:
        """Sets every learning rate to a multiple of its undecayed one.

        Args:
            factor: A number, or one float32 on the device.
        """
        torch.mul(self._undecayed, factor, out=self._decayed)

    def rates(self) -> dict[str, float]:
        """Returns the present learning rates by name; synchronises with the device."""
        names = ("grid", "network")[: 1 if self.network is None else 2]
        return {name: float(lr) for name, lr in zip(names, self._lrs, strict=False)}

    def step(self) -> None:
        """Updates the grids and clears their gradients; updates the network and drops its own."""
        self.grid.step()
        if self.network is not None:
            self.network.step()
            self.network.zero_grad(set_to_none=True)

    def _active_levels(self) -> list[torch.nn.Parameter]:
        return self._field.grid.levels[: self._field.grid.active]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint needs."""
        return {"grid": self.grid.state_dict(), "network": None if self.network is None else self.network.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes moments and step counts from a checkpoint; rates and constants stay as configured."""
        for name, optimizer, lr in zip(("grid", "network"), (self.grid, self.network), self._lrs, strict=True):
            if optimizer is None:
                continue
            own = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state[name]["state"], "param_groups": own})
            # Loading made a copy of the rate; the optimizer is to follow the one that `scale` changes.
            optimizer.param_groups[0]["lr"] = lr


def _channel_rates(field: RadianceField, view_lr_factor: float) -> Tensor | None:
    """Shares of the grids' learning rate by channel, None where all are 1."""
    if view_lr_factor == 1:
        return None
    decoder = field.decoder
    view_channels: tuple[int, ...] = getattr(decoder, "view_channels", ())
    if not view_channels:
        raise ValueError(
            f"optimizer.view_lr_factor must be 1 for this {type(decoder).__name__}, which has no channels for the "
            f"viewing direction alone, got {view_lr_factor}"
        )
    rates = torch.ones(decoder.channels, device=field.aabb.device)
    rates[list(view_channels)] = view_lr_factor
    return rates
