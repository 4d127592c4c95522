"""The optimizers of grids, networks and the parameters of components, with learning rates in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield import processes
from voxelfield.distributed.division import DividedGrids
from voxelfield.distributed.shards import new_table, tile_vertices
from voxelfield.fields.decoders import Decoder
from voxelfield.foundation.optimizers import EagerAdamW, EagerMethods, load_moments
from voxelfield.grids.adam import MAX_BETA, GridAdam, sum_weights
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.sparse_grid import SparseGrid
from voxelfield.models.component import Component
from voxelfield.models.model import Model
from voxelfield.settings import OptimizerConfig, RatesConfig

# Number of vertices from which restricting updates to the active tiles pays off.
_WORTH_LISTING = 1 << 17


class EagerGridAdam(GridAdam, EagerMethods):
    """A :class:`voxelfield.GridAdam` that does not import torch's compiler."""


def moments_dtype(setting: str, copies: torch.dtype, betas: Sequence[float]) -> torch.dtype:
    """Returns the dtype of the grids' moments, given ``optimizer.moments``, with which ``auto`` depends on the rest.

    Raises:
        ValueError: They cannot be bfloat16 with these ``betas``.
    """
    slow = max(betas) > MAX_BETA
    if setting == "bfloat16" and slow:
        raise ValueError(
            f"trainer.rates.betas must be at most {MAX_BETA:g} where optimizer.moments is bfloat16, got {list(betas)}"
        )
    narrow = copies != torch.float32 and not slow if setting == "auto" else setting == "bfloat16"
    return torch.bfloat16 if narrow else torch.float32


class Optimizers:
    """GridAdam for a field's grids, components' optimizers for its networks, and fused AdamW for all other parameters.

    A step does not synchronise with the device, so it can be captured in a CUDA graph. Models and components that
    change grids call methods from :meth:`attach` to :meth:`add_total_variation`
    (:attr:`voxelfield.models.training.TrainingSetup.optimizer`).

    The components, of which the model is one, have groups of parameters with learning rates of their own and without
    weight decay. The networks' optimizers do not update them, even if they belong to the field. The grids' working
    copies have the dtype ``copies``; ``samples`` is the largest number of samples of a step of several processes.

    Attributes:
        grid: The grids' optimizer; pass it to operations that change a grid's resolution or box. None without grids.
        networks: The optimizers of the field's other parameters, at the network's learning rate, by the names of the
            components that made them; ``network`` is AdamW.
        others: The optimizers of the components' groups, by name.
        attached: Number of calls of :meth:`attach`.
        division: The division of the grids over several processes, between :meth:`attach` and :meth:`gather`.

    Raises:
        ValueError: ``config.view_lr_factor`` is not 1, but the decoder has no channels that describe view dependence;
            or a group has the name of one of the field's own optimizers.
    """

    def __init__(
        self,
        model: Model,
        config: OptimizerConfig,
        rates: RatesConfig,
        components: Sequence[Component] = (),
        copies: torch.dtype = torch.float32,
        samples: int = 0,
    ) -> None:
        self._model = model
        self._copies, self._samples = copies, samples
        self._smooths = any(component.smooths_grids for component in components)
        self.attached = 0
        self.division: DividedGrids | None = None
        device = model.device
        grids = model.grid.levels
        groups = {name: group for component in components for name, group in component.param_groups().items()}
        lrs = [rates.grid * config.grid_lr, rates.network * config.network_lr, *(lr for _, lr in groups.values())]
        self._undecayed = torch.tensor(lrs, dtype=torch.float32, device=device)
        self._decayed = self._undecayed.clone()
        # Views into the tensor of rates: each optimizer uses its own element.
        grid_lr, network_lr, *other_lrs = self._decayed.split(1)
        self.grid: GridAdam | None = None
        if grids:
            self.grid = EagerGridAdam(
                _grid_groups(model, config.view_lr_factor),
                lr=grid_lr,
                betas=rates.betas,
                eps=config.eps,
                weight_decay=rates.weight_decay * config.grid_weight_decay,
                skip_untouched=config.skip_untouched,
                bfloat16_moments=moments_dtype(config.moments, copies, rates.betas) == torch.bfloat16,
            )
        self._skips, self._tables = config.skip_untouched, dict[nn.Parameter, Tensor]()
        self._sparse = [module for module in model.grid.modules() if isinstance(module, SparseGrid)]
        # By identity, because tensors are compared element by element.
        updated = {id(parameter) for parameter in (*grids, *(p for group, _ in groups.values() for p in group))}
        network = [parameter for parameter in model.parameters() if id(parameter) not in updated]
        options: dict[str, Any] = {"betas": rates.betas, "eps": config.eps, "fused": True}
        options["capturable"] = device.type == "cuda"
        decay = config.network_weight_decay
        self.networks: dict[str, torch.optim.Optimizer] = {}
        for component in components:
            chosen = component.network_optimizer(network, network_lr, rates.betas, decay)
            if chosen is not None:
                self.networks[component.name] = chosen
                updated = {id(parameter) for group in chosen.param_groups for parameter in group["params"]}
                network = [parameter for parameter in network if id(parameter) not in updated]
        if network:
            self.networks["network"] = EagerAdamW(network, lr=network_lr, weight_decay=decay, **options)
        taken = [name for name in groups if name in {"grid", "network", *self.networks}]
        if taken:
            raise ValueError(f"groups must not have the name of the field's own optimizers, got {taken[0]!r}")
        self.others = {
            name: EagerAdamW(list(parameters), lr=lr, weight_decay=0.0, **options)
            for (name, (parameters, _)), lr in zip(groups.items(), other_lrs, strict=True)
        }
        self._small: dict[str, torch.optim.Optimizer] = {**self.networks, **self.others}
        # The other optimizers' small kernels run on a stream of their own, beside the grids' few large ones.
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def attach(self) -> None:
        """Makes the field read working copies of its grids and accumulate gradients; call after any change of them.

        With several processes, grids and moments are divided among them until :meth:`gather`.
        """
        grid, divides = self._model.grid, processes.count() > 1
        self.gather(grid.levels[grid.active :])  # levels that are no longer read
        previous, self.division = self.division, None
        if previous is not None:
            previous.free()
        grid.enable_copies(self._copies, allocate_gradients=not divides)
        self.attached += 1
        working = grid.working_copies
        if working is None or self.grid is None:
            return
        if divides:
            self.division = DividedGrids(
                working,
                self.grid,
                [self._is_listed(level) for level in working.grids],
                self._model.occupancy.occupied,
                samples=self._samples,
                halo=self._smooths,
                previous=previous,
            )
            return
        for parameter, copy in zip(working.grids, working.copies, strict=True):
            self.grid.set_working(parameter, copy if self._copies != torch.float32 else None)
        self.restrict()

    def gather(self, grids: Sequence[nn.Parameter] | None = None) -> None:
        """Makes grids and moments that are divided over processes whole until :meth:`attach`; a collective call.

        To be called before any change of grids. Without a list of those that will be changed, all become whole; others
        may read as NaN until :meth:`attach`.
        """
        if self.division is not None and self.division.gather(grids):
            self.division = None

    def local_shards(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters, sharded ones replaced by the shard of this process."""
        return list(parameters if self.division is None else map(self.division.local_shard, parameters))

    def collected(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> list[Any]:
        """Returns values of the shards of this process as a checkpoint stores them; a collective call."""
        if self.division is None:
            return list(values)
        pairs = zip(parameters, values, strict=True)
        return [self.division.collected(parameter, value) for parameter, value in pairs]

    def local_values(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> list[Tensor]:
        """Returns the values of the shards of this process, from values of whole parameters."""
        return list(values if self.division is None else map(self.division.local_planes, parameters, values))

    def refresh_copies(self) -> None:
        """Rounds the grids into their working copies, after a change by something else than a step; collective."""
        if self.division is None:
            self._model.grid.refresh_copies()
        else:
            self.division.refresh()

    @property
    def layout(self) -> int:
        """Changes whenever tensors that a captured step refers to have been replaced."""
        return self.attached if self.division is None else self.attached + self.division.layout

    def restrict(self) -> None:
        """Updates the active tiles, so that only vertices that samples in occupied cells can read are updated."""
        if self.division is not None:
            self.division.restrict(self._model.occupancy.occupied)
            return
        for adam, level in self._active_levels():
            listed = self._is_listed(level)
            if listed and level.grad is not None:
                # Total variation also adds gradients outside the tiles; later steps must not use them.
                level.grad.zero_()
            adam.set_active(level, self._model.occupancy.occupied if listed else None)

    def _is_listed(self, parameter: nn.Parameter) -> bool:
        """Returns whether only the active tiles of a level are updated.

        Updating a whole small grid is faster than listing its active tiles. The blocks of a sparse grid are all active.
        """
        return parameter[..., 0].numel() >= _WORTH_LISTING and not self._is_sparse(parameter)

    @torch.no_grad()
    def scale(self, factor: Tensor | float) -> None:
        """Sets every learning rate to a multiple of its undecayed one."""
        torch.mul(self._undecayed, factor, out=self._decayed)

    def rates(self) -> dict[str, float]:
        """Returns the current learning rates by name; synchronises with the device."""
        there = {"grid": self.grid is not None, "network": bool(self.networks), **dict.fromkeys(self.others, True)}
        rates = dict(zip(there, self._decayed.tolist(), strict=True))
        return {name: rate for name, rate in rates.items() if there[name]}

    def add_total_variation(self, weight: float) -> None:
        """Adds the gradient of the weighted squared differences between neighbouring vertices of active dense levels.

        Of large levels, only the vertices that are updated get one.
        """
        if self.division is not None:
            self.division.add_total_variation(weight)
            return
        for adam, parameter in self._active_levels():
            if self._is_sparse(parameter):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # The optimizer's term is a mean over the pairs of neighbours along each axis.
            adam.add_total_variation(parameter, sum_weights(parameter, weight))

    def step(self, arrive: Callable[[], None] | None = None) -> None:
        """Updates the grids and clears their gradients; updates everything else and drops its gradients.

        Args:
            arrive: Called before any gradient is read, except the gradients of divided grids. It may be called within
                another CUDA stream, and must make that stream alone wait.
        """
        if self.division is None and arrive is not None:
            arrive()
            arrive = None
        side, small = self._side_stream, self._small.values()
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(side.device))
        # Before the small steps, so that without a side stream the sums arrive while divided grids are updated.
        if self.division is not None:
            self.division.step()
        # torch.cuda.stream(None) would initialise CUDA on a CPU.
        with nullcontext() if side is None else torch.cuda.stream(side):
            if arrive is not None:
                arrive()
            for optimizer in small:
                optimizer.step()
        if self.division is None and self.grid is not None:
            for grid in self._sparse:
                table = self._table(grid)
                grid.share_gradient(table)
                if table is not None:
                    self.grid.set_touched(grid.features, table)
            self.grid.step()
        if side is not None:
            torch.cuda.current_stream(side.device).wait_stream(side)
        # Only now, because the memory of gradients may be used again on this stream as soon as they are dropped.
        for optimizer in small:
            optimizer.zero_grad(set_to_none=True)

    def _table(self, grid: SparseGrid) -> Tensor | None:
        """Returns the table of a grid's touched vertices; None on a CPU, where it saves nothing, or without use."""
        features = grid.features
        if features.grad is None or not features.is_cuda or not self._skips:
            return None
        rows = -(-features[..., 0].numel() // tile_vertices())
        table = self._tables.get(features)
        if table is None or len(table) != rows:
            table = self._tables[features] = new_table(rows, features.device)
        return table

    def _is_sparse(self, parameter: torch.nn.Parameter) -> bool:
        return any(parameter is grid.features for grid in self._sparse)

    def _active_levels(self) -> Iterator[tuple[GridAdam, torch.nn.Parameter]]:
        """Yields the levels that are trained at present, each with its optimizer."""
        if self.grid is not None:
            for level in self._model.grid.levels[: self._model.grid.active]:
                yield self.grid, level

    def state_dict(self, divided: Mapping[nn.Parameter, Any] | None = None) -> dict[str, Any]:
        """Returns the state for a checkpoint, with packed moments of divided grids (:meth:`DividedGrids.packed`)."""
        states: dict[str, Any] = dict.fromkeys(("grid", "network"))
        if self.grid is not None:
            divided = divided or {}
            for grid, moments in divided.items():
                self.grid.state[grid] = moments
            states["grid"] = self.grid.state_dict()
            for grid in divided:
                del self.grid.state[grid]
        return states | {name: optimizer.state_dict() for name, optimizer in self._small.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads moments and step counts from a checkpoint; rates and constants stay as configured."""
        for name, optimizer in {"grid": self.grid, **self._small}.items():
            # A component without a state may not have existed when the checkpoint was written.
            if optimizer is not None and state.get(name) is not None:
                load_moments(optimizer, state[name]["state"])


def _grid_groups(model: Model, view_lr_factor: float) -> list[dict[str, Any]]:
    """Returns the grid's levels as groups, each with the factors on the learning rate of its levels' channels."""
    levels = model.grid.levels
    if view_lr_factor == 1:
        return [{"params": levels}]
    decoder = getattr(model.field, "decoder", None)  # which a field need not have
    if not isinstance(decoder, Decoder) or not decoder.view_channels:
        raise ValueError(
            f"optimizer.view_lr_factor must be 1 for this {type(decoder).__name__}, which has no channels for the "
            f"viewing direction alone, got {view_lr_factor}"
        )
    rates = torch.ones(decoder.channels, device=model.device)
    rates[list(decoder.view_channels)] = view_lr_factor
    stored = model.grid.combination.channels if isinstance(model.grid, VoxelPyramid) else ()
    groups: list[dict[str, Any]] = []
    for channels, same in groupby(zip(levels, stored or (None,) * len(levels), strict=True), key=itemgetter(1)):
        own = rates if channels is None else rates[list(channels)]
        groups.append({"params": [level for level, _ in same], "channel_rates": own})
    return groups
