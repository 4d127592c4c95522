"""A component of training: hooks into each step, losses, parameters and state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from voxelfield.foundation.errors import shown
from voxelfield.foundation.extensions import load_entry
from voxelfield.models.batch import Batch, Outputs
from voxelfield.rendering.cameras import Cameras

Loss = Callable[[Outputs, Batch], Tensor]
"""A loss term: maps a model's outputs for a batch to a scalar tensor, multiplied by its weight."""

Kind = TypeVar("Kind")


class Component:
    """Joins every step of training; all methods do nothing by default. A :class:`voxelfield.Model` is a component too.

    :meth:`before_step`, :meth:`stage_begun`, :meth:`step_done` and :meth:`finish` are called between two steps: their
    Python code runs every time, and they may synchronise with the device. The methods from :meth:`cameras` to
    :meth:`after_step` are called in this order within each step. On CUDA they are captured in the step's graph: they
    run on the device, must not synchronise with it, and their Python code runs only while the graph is captured.
    ``trainer.cuda_graph=false`` calls them in every step.

    Attributes:
        name: Key of the component's state in checkpoints, different for each component of a session.
        before_model: Whether the component's hooks are called before those of the model, instead of after.
        pose_errors: How wrong the given cameras may be if the component moves them: by ``pixels``, so that images must
            not exclude space, or ``large``, so that not even what no camera sees is known; ``none`` for exact ones.
        smooths_grids: Whether it calls ``add_total_variation`` of the model's optimizer, for which processes that
            divide grids also exchange the borders of their shards.
    """

    name = ""
    before_model: ClassVar[bool] = False
    pose_errors: Literal["none", "pixels", "large"] = "none"
    smooths_grids: ClassVar[bool] = False

    def before_step(self, step: int) -> None:
        """Called before each step, outside of the CUDA graph, with the number of steps done.

        The model's comes first, unless :attr:`before_model`.
        """

    def stage_begun(self) -> None:
        """Called when the grids have changed their box or resolution, and before the first step."""

    def step_done(self, step: int) -> None:
        """Called after each step, outside of the CUDA graph, with the number of steps done."""

    def finish(self) -> None:
        """Called after the last step, before the field is saved."""

    def cameras(self) -> Cameras | None:
        """Returns cameras that replace the cameras of the images, differentiably, or None."""
        return None

    def prepare(self, batch: Batch) -> None:
        """Called with the batch before it is rendered, for instance to pass the time of each ray to the field."""

    def adjust(self, outputs: Outputs, batch: Batch) -> None:
        """Changes ``outputs.rgb`` and ``outputs.field_truth`` before ``outputs.pixels`` are computed from them."""

    def losses(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Returns loss terms by name, each a scalar that is already multiplied by its weight.

        A term replaces an earlier one of the same name, such as the model's ``photometric``.
        """
        return {}

    def after_backward(self, step: Tensor) -> None:
        """Called when gradients, which the loss scale multiplies, have been accumulated, before any update.

        ``step`` is the number of steps done, () int64 on the device.
        """

    def after_step(self, step: Tensor) -> None:
        """Called after the update of all parameters, with the same ``step`` as :meth:`after_backward`."""

    def param_groups(self) -> Mapping[str, tuple[Sequence[nn.Parameter], float]]:
        """Returns parameters that the session optimises by Adam, with their learning rates, by name.

        The rates decay like the rates of grids and networks. Parameters that the component updates itself are not
        included.
        """
        return {}

    def parameters(self) -> Sequence[nn.Parameter]:
        """Returns all parameters that receive gradients; by default, those of :meth:`param_groups`."""
        return [parameter for group, _ in self.param_groups().values() for parameter in group]

    def network_optimizer(
        self, parameters: Sequence[nn.Parameter], lr: Tensor, betas: Sequence[float], weight_decay: float
    ) -> torch.optim.Optimizer | None:
        """Returns an optimizer of some parameters of the field, in place of AdamW, or None.

        Its state is in checkpoints. On CUDA its steps are captured in the step's graph.

        Args:
            parameters: The parameters to choose from: none of grids, nor of :meth:`param_groups`.
            lr: (1,) the learning rate of networks, on their device; its value changes in each step.
            betas: Averaging constants (``trainer.rates.betas``).
            weight_decay: ``optimizer.network_weight_decay``.
        """
        return None

    def scalars(self) -> dict[str, float]:
        """Returns values for the log, by tag; may synchronise with the device."""
        return {}

    def write_results(self, folder: Path) -> None:
        """Writes files to the folder of a run that is finished.

        Called in all processes that train together, of which each has its share of the images. An OSError is reported
        once all other results are written.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint; an empty one is not saved.

        A collective call: all processes that train together make it, and the state of the first is saved.
        """
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if a state does not belong to this component; called before any state is loaded."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state that :meth:`state_dict` returned, from any device."""


class LossTerms(Component):
    """Adds loss terms, by name, without parameters or a state.

    The component needs a name of its own if others have terms too.
    """

    def __init__(self, terms: Mapping[str, Loss], name: str = "") -> None:
        self._terms, self.name = terms, name

    def losses(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        """Returns the terms."""
        return {name: term(outputs, batch) for name, term in self._terms.items()}


def named_losses(names: Sequence[str]) -> dict[str, Loss]:
    """Imports loss terms ``module:function``, by the names of the functions; raises ValueError where that fails."""
    found: dict[str, Loss] = {}
    for name in names:
        try:
            loss = load_entry(EntryPoint("losses", name, ""))
            if not callable(loss):
                raise ValueError(f"it is {shown(loss)}")
        except ValueError as error:
            raise ValueError(f"losses must name functions of outputs and batch, got {name}: {error}") from error
        term = name.rpartition(":")[2].rpartition(".")[2]
        if term in found:
            raise ValueError(f"losses must name functions of different names, got {', '.join(names)}")
        found[term] = loss
    return found


def find_component(components: Sequence[Component], kind: type[Kind]) -> Kind | None:
    """Returns the first component of a class, or None."""
    return next((each for each in components if isinstance(each, kind)), None)
