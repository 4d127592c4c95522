"""Adam for grids, networks and what parts of training learn, with learning rates in device memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield.fields.field import RadianceField
from voxelfield.grids.sparse_grid import SparseGrid
from voxelfield.models.model import Model
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.training.config import OptimizerConfig, RatesConfig
from voxelfield.training.eager import EagerAdamW, EagerGridAdam

# Number of vertices from which restricting updates to the active tiles pays off.
_WORTH_LISTING = 1 << 17


def copies_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of the grids' working copies: float16 on CUDA with a 16-bit ``trainer.precision``."""
    return torch.float16 if device.type == "cuda" and precision != "float32" else torch.float32


class Optimizers:
    """GridAdam for a field's grids, and fused AdamW for its decoder's network and for further groups of parameters.

    A step does not synchronise with the device, so it can be captured in a CUDA graph.

    Args:
        model: The model to train.
        config: Learning rates and constants that depend on the model.
        rates: Factors that depend on the length of the run.
        groups: Further parameters with their learning rates, by name; without weight decay.

    Attributes:
        grid: The grids' optimizer; pass it to operations that change a grid's resolution or box. None without grids.
        network: The network's optimizer, or None.
        others: The optimizers of the further groups, by name.

    Raises:
        ValueError: ``config.view_lr_factor`` is not 1, but the decoder has no channels that describe view dependence.
    """

    def __init__(
        self,
        model: Model,
        config: OptimizerConfig,
        rates: RatesConfig,
        groups: Mapping[str, tuple[Sequence[nn.Parameter], float]] | None = None,
    ) -> None:
        self._model = model
        field, device = model.field, model.device
        grids = model.grid.levels
        groups = groups or {}
        lrs = [rates.grid * config.grid_lr, rates.network * config.network_lr, *(lr for _, lr in groups.values())]
        self._undecayed = torch.tensor(lrs, dtype=torch.float32, device=device)
        self._decayed = self._undecayed.clone()
        # Views into the tensor of rates: each optimizer uses its own element.
        self._lrs = self._decayed.split(1)
        self.grid: EagerGridAdam | None = None
        if grids:
            self.grid = EagerGridAdam(
                grids,
                lr=self._lrs[0],
                betas=rates.betas,
                eps=config.eps,
                weight_decay=rates.weight_decay * config.grid_weight_decay,
                channel_rates=_channel_rates(field, config.view_lr_factor),
                skip_untouched=config.skip_untouched,
            )
        self._sparse = [module for module in model.grid.modules() if isinstance(module, SparseGrid)]
        of_grids = {id(parameter) for parameter in grids}
        network = [parameter for parameter in field.parameters() if id(parameter) not in of_grids]

        def adamw(parameters: list[torch.nn.Parameter], lr: Tensor, decay: float) -> EagerAdamW:
            return EagerAdamW(
                parameters,
                lr=lr,
                betas=rates.betas,
                eps=config.eps,
                weight_decay=decay,
                fused=True,
                capturable=device.type == "cuda",
            )

        self.network = adamw(network, self._lrs[1], config.network_weight_decay) if network else None
        self.others = {
            name: adamw(list(parameters), lr, 0.0)
            for (name, (parameters, _)), lr in zip(groups.items(), self._lrs[2:], strict=True)
        }

    def attach(self, dtype: torch.dtype, occupancy: OccupancyGrid) -> None:
        """Makes the field read working copies of its grids and accumulate gradients; call after any change of them.

        Args:
            dtype: Dtype of the copies.
            occupancy: The occupied cells; only vertices that samples in them can read are updated.
        """
        copies = self._model.grid.enable_copies(dtype)
        for (adam, parameter), copy in zip(self._active_levels(), copies, strict=True):
            adam.set_working(parameter, copy if dtype != torch.float32 else None)
        self.restrict(occupancy)

    def restrict(self, occupancy: OccupancyGrid) -> None:
        """Updates the active tiles after a change of the occupied cells at the same resolutions and box."""
        for adam, parameter in self._active_levels():
            # Updating a whole small grid is faster than listing its active tiles. The blocks of a sparse grid are all
            # active.
            if parameter[..., 0].numel() >= _WORTH_LISTING and not self._is_sparse(parameter):
                # Total variation also adds gradients outside the tiles; later steps must not use them.
                if parameter.grad is not None:
                    parameter.grad.zero_()
                adam.set_active(parameter, occupancy.occupied)
            else:
                adam.set_active(parameter, None)

    @torch.no_grad()
    def scale(self, factor: Tensor | float) -> None:
        """Sets every learning rate to a multiple of its undecayed one.

        Args:
            factor: A number, or one float32 on the device.
        """
        torch.mul(self._undecayed, factor, out=self._decayed)

    def rates(self) -> dict[str, float]:
        """Returns the current learning rates by name; synchronises with the device."""
        return {name: float(lr) for name, _, lr in self._all()}

    def add_total_variation(self, weight: float) -> None:
        """Adds the gradient of the squared differences between neighbouring vertices, in every active dense level.

        Of large levels, only the vertices that are updated get one.

        Args:
            weight: Factor on the sum of these squares.
        """
        for adam, parameter in self._active_levels():
            if self._is_sparse(parameter):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            x, y, z, channels = parameter.shape
            # The optimizer's term is a mean over the pairs of neighbours along each axis.
            pairs = [(x - 1) * y * z, x * (y - 1) * z, x * y * (z - 1)]
            adam.add_total_variation(parameter, [weight * channels * along for along in pairs])

    def step(self) -> None:
        """Updates the grids and clears their gradients; updates everything else and drops its gradients."""
        for grid in self._sparse:
            grid.share_gradient()
        if self.grid is not None:
            self.grid.step()
        for optimizer in (self.network, *self.others.values()):
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def _all(self) -> list[tuple[str, torch.optim.Optimizer, Tensor]]:
        """Returns the existing optimizers with their names and learning rates."""
        named = (("grid", self.grid), ("network", self.network), *self.others.items())
        rated = zip(named, self._lrs, strict=True)
        return [(name, optimizer, lr) for (name, optimizer), lr in rated if optimizer is not None]

    def _is_sparse(self, parameter: torch.nn.Parameter) -> bool:
        return any(parameter is grid.features for grid in self._sparse)

    def _active_levels(self) -> Iterator[tuple[EagerGridAdam, torch.nn.Parameter]]:
        """Yields the levels that are trained at present, each with its optimizer."""
        if self.grid is not None:
            for level in self._model.grid.levels[: self._model.grid.active]:
                yield self.grid, level

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return dict.fromkeys(("grid", "network")) | {name: optimizer.state_dict() for name, optimizer, _ in self._all()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads moments and step counts from a checkpoint; rates and constants stay as configured."""
        for name, optimizer, lr in self._all():
            own = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state[name]["state"], "param_groups": own})
            # Loading copied the rate; the optimizer must use the tensor that `scale` changes.
            optimizer.param_groups[0]["lr"] = lr


def _channel_rates(field: RadianceField, view_lr_factor: float) -> Tensor | None:
    """Returns the factors on the grids' learning rate by channel; None if all are 1."""
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
