"""Everything that training changes: how it is built, how it takes a step, and how it is saved and restored."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from voxelfield import processes
from voxelfield.components.registry import Training, build_components, recorded
from voxelfield.datasets.scene import Scene
from voxelfield.devices import peak_bytes
from voxelfield.distributed.reduction import divided_density
from voxelfield.evaluation.metrics import mse_to_psnr
from voxelfield.grids.working_copies import copies_dtype
from voxelfield.models.batch import Batch
from voxelfield.models.component import Component, Loss, LossTerms
from voxelfield.models.losses import rendering_terms
from voxelfield.models.pixel_sampler import Images, PixelSampler
from voxelfield.models.settings import reached_resolution
from voxelfield.models.training import TrainingSetup
from voxelfield.rendering.march import Sampler
from voxelfield.settings import RunConfig, TrainerConfig
from voxelfield.trained.checkpoint_file import ADDED
from voxelfield.trained.trained_model import untrained_model
from voxelfield.training.execution import Clock, GraphedCall
from voxelfield.training.optimizer import Optimizers
from voxelfield.training.step import TrainingStep

logger = logging.getLogger(__name__)

ENTRIES = (
    *("step", "train_seconds", "rays", "untrained_error", "diverged", "optimizer", "data", "config"),
    *("model", "rng", "cuda_rng"),
)
"""Entries of every checkpoint. Others are states of components."""


class TrainingState:
    """A model with everything that trains it; it takes steps, and can be saved and restored.

    In processes that train together, all methods are collective calls. The last three arguments are those of
    :class:`voxelfield.Session`.

    Attributes:
        model: The model.
        components: The configured components, then the given ones.
        optimizers: The optimizers of the field and of the components' parameters.
        training_step: Computes one step.
        steps: Number of steps done.
        clock: Counts the training time, building included.
        untrained_error: Photometric loss of the untrained field, () on the device; infinite before the first step.
        diverged: Whether, at the last record, training pixels were rendered clearly worse than by the untrained field.
    """

    def __init__(
        self,
        config: RunConfig,
        scene: Scene,
        device: torch.device,
        images: Images,
        components: Sequence[Component],
        losses: Mapping[str, Loss],
        sampler: Sampler,
    ) -> None:
        torch.manual_seed(config.seed)
        trainer = config.trainer
        self.config, self.device, self.clock = config, device, Clock(device)
        self.clock.start()
        self.model = untrained_model(config, device)
        size, patches = trainer.patch_size, trainer.patches
        pixels = PixelSampler(scene.train, device, trainer.supersampling, patches, size, images=images)
        self.components = [*build_components(Training(config, scene, self.model, pixels)), *components]
        _check_names(self.components)
        first = [component for component in self.components if component.before_model]
        self._joining = [*first, self.model, *(each for each in self.components if each not in first)]
        copies = copies_dtype(trainer.precision, device)
        self.optimizers = Optimizers(
            self.model, config.optimizer, trainer.rates, self._joining, copies, trainer.visible_samples
        )
        joining = [*self._joining, LossTerms(losses)]
        self.training_step = TrainingStep(self.model, pixels, self.optimizers, trainer, joining, sampler)
        errors = {component.pose_errors for component in self._joining}
        setup = TrainingSetup(
            trainer.stages,
            trainer.occupancy,
            rendering_terms(trainer.loss, self.model.unit if self.model.warp is None else 1.0),
            self.optimizers,
            pixels.cameras,
            # Wrong poses would make images carve away matter.
            visual_hull=pixels.visual_hull if errors <= {"none"} else None,
            reliable_poses="large" not in errors,
            divide=divided_density,
        )
        self.model.begin_training(setup)
        self.steps = 0
        self.untrained_error = torch.full_like(self.training_step.error, math.inf)
        self.diverged = False
        self.optimizers.attach()
        self._renew()
        self.clock.read()
        self.clock.lap()

    def _renew(self) -> None:
        """Recreates everything that depends on the grids' shapes, apart from the optimizers' part of it."""
        # The graph captures these as numbers, because computing them inside the capture would read from the device.
        settings, captures = self.model.settings, self.config.trainer.cuda_graph
        if settings.roulette > 0 and not self.model.is_marched_at_once:
            logger.warning("all faint samples are kept in spite of model.roulette: no kernel marches this field")
        self._graphed = GraphedCall(lambda: self.training_step.run(settings), self.device, captures)
        self._layout = self.optimizers.layout

    def prepare_step(self) -> bool:
        """Does what precedes a step; returns whether the grid has changed its box or resolution."""
        division = self.optimizers.division
        if division is not None and division.materialized:
            division.release()
        trainer = self.config.trainer
        resized = self.training_step.size_batch(trainer.batch_share(self.steps))
        if resized or any(stage.step == self.steps for stage in trainer.stages):
            self._graphed.discard()  # it has the old size, or its memory is needed for the change of the grids
        attached = self.optimizers.attached
        for component in self._joining:
            component.before_step(self.steps)
        if self.optimizers.attached != attached:
            self._renew()
            for component in self._joining:
                component.stage_begun()
            return True
        if self.optimizers.layout != self._layout:
            self._graphed.discard()
            self._layout = self.optimizers.layout
        return False

    def take_step(self) -> Batch:
        """Takes the step that :meth:`prepare_step` has prepared, and returns its batch."""
        if self.optimizers.division is not None:
            self.optimizers.division.start_moments()
        self._graphed()
        if self.steps == 0:  # whose pixels were rendered before it changed the field
            self.untrained_error.copy_(processes.sum_of(self.training_step.share_of_error))
        self.steps += 1
        for component in self._joining:
            component.step_done(self.steps)
        return self.training_step.batch

    def finish(self) -> None:
        """Lets components finish their work on the field after the last step, such as averaging its weights."""
        for component in self._joining:
            component.finish()

    def materialize(self) -> None:
        """Makes grids whole that are divided over processes, until the next step."""
        division = self.optimizers.division
        if division is not None and not division.materialized:
            division.materialize()
            # A process group cannot end while a captured graph refers to it.
            self._graphed.discard()

    def is_finite(self) -> bool:
        """Returns whether all parameters of the model are finite; synchronises with the device."""
        local = self.optimizers.local_shards(self.model.parameters())
        return not processes.any_of(not all(bool(parameter.detach().sum().isfinite()) for parameter in local))

    def collect_metrics(self) -> dict[str, float]:
        """Returns the metrics of the steps since the last call, by tag; synchronises with the device.

        Raises:
            FloatingPointError: The loss or the field is not finite.
            EmptyFieldError: No cell is occupied.
        """
        since_last, totals = self.clock.lap(), self.training_step.totals.read()
        taken = totals["steps"] - totals.get("skipped", 0)
        losses = {
            name: total / taken if taken else math.nan for name, total in totals.items() if name.startswith("loss/")
        }
        # Where the field is NaN, no sample is visible, so the loss of the remaining samples may be finite.
        if not self.is_finite() or not all(math.isfinite(value) for value in losses.values()):
            raise FloatingPointError(
                f"step {self.steps}: the loss or the field was not finite since the last record, now {losses}; lower "
                "optimizer.grid_lr or optimizer.network_lr, or trainer.loss_scale where gradients are float16, or set "
                "trainer.not_finite=skip"
            )
        self._note_divergence(losses["loss/photometric"])
        values = losses | {"train/psnr": float(mse_to_psnr(torch.tensor(losses["loss/photometric"])))}
        values |= rates_of_steps(totals, self.config.trainer, since_last)
        values["train/occupancy"] = self.model.occupied_fraction(self.steps)
        values["train/seconds"] = self.clock.seconds
        for component in (self.model, *self.components):
            values |= component.scalars()
        values |= {f"lr/{name}": rate for name, rate in self.optimizers.rates().items()}
        if self.device.type == "cuda":
            values["gpu/allocated_GiB"] = torch.cuda.memory_allocated(self.device) / 2**30
            values["gpu/peak_GiB"] = peak_bytes(self.device) / 2**30
        return values

    def _note_divergence(self, loss: float) -> None:
        """Compares the mean squared error of pixels since the last record with the error of the first step.

        A field may become worse in its very first steps. After that, a field that learns at all is better, and batches
        of pixels differ by less than 1.8 dB; a field with far too high learning rates is worse by 3 dB and more, and
        stays so.
        """
        before, untrained = self.diverged, float(self.untrained_error)
        self.diverged = self.steps >= 20 and loss > 1.5 * untrained
        if self.diverged and not before:
            logger.warning(
                "step %d: training diverges, with training pixels at %.1f dB after %.1f dB before the first step; "
                "lower trainer.rates.grid and trainer.rates.network",
                *(self.steps, -10 * math.log10(loss), -10 * math.log10(max(untrained, 1e-10))),
            )

    def entries(self) -> dict[str, Any]:
        """Returns the :data:`ENTRIES` of a checkpoint, except ``data``, to process 0, and nothing to others."""
        states = {component.name: component.state_dict() for component in self.components}
        division = self.optimizers.division
        masters, moments = ({}, {}) if division is None else division.packed()
        if not processes.is_first():
            return {}
        model = self.model.state_dict()
        model |= {name: masters[given] for name, given in self.model.named_parameters() if given in masters}
        return {
            **{name: state for name, state in states.items() if state},
            "step": self.steps,
            "train_seconds": self.clock.seconds,
            "rays": self.training_step.rays,
            "untrained_error": self.untrained_error,
            "diverged": self.diverged,
            "model": model,
            "optimizer": self.optimizers.state_dict(moments),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "config": recorded(self.config),
        }

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the entries of a checkpoint that fits; the grid adopts the saved resolution and box."""
        self.optimizers.gather()
        self.model.load_state_dict(checkpoint["model"])
        self.steps, self.clock.seconds = checkpoint["step"], checkpoint["train_seconds"]
        self.clock.lap()
        self.model.resolution = reached_resolution(self.config.trainer.stages, self.steps)
        self.optimizers.load_state_dict(checkpoint["optimizer"])
        self.training_step.resume(self.steps, checkpoint["rays"])
        self.untrained_error.copy_(checkpoint["untrained_error"])
        self.diverged = checkpoint["diverged"]
        self.optimizers.attach()
        self._renew()
        for component in self.components:
            if component.name in checkpoint:
                component.load_state_dict(checkpoint[component.name])
        torch.set_rng_state(checkpoint["rng"].cpu())
        if self.device.type == "cuda" and checkpoint["cuda_rng"] is not None:
            torch.cuda.set_rng_state(checkpoint["cuda_rng"].cpu(), self.device)


def rates_of_steps(totals: Mapping[str, float], config: TrainerConfig, seconds: float) -> dict[str, float]:
    """Returns the numbers of rays and samples of some steps, from their totals and their duration.

    Raises ValueError if no pixel's samples fitted in the capacity.
    """
    steps, rays = totals["steps"], totals["rays"]
    if rays < steps * config.supersampling**2:
        names, room = "trainer.visible_samples", str(config.visible_samples)
        if "candidates" in totals:
            names, room = f"trainer.candidate_samples and {names}", f"{config.candidate_samples} and {room}"
        if config.batch_share(0) < 1:
            room += ", of which early steps have a part (trainer.small_batches)"
        raise ValueError(f"{names} must have room for one pixel's samples, got {room}: raise it")
    values = {
        "train/rays_per_step": rays / steps,
        "train/samples_per_ray": totals["samples"] / rays,
        "train/rays_per_second": rays / seconds,
    }
    if "skipped" in totals:
        values["train/skipped_steps"] = totals["skipped"]
    if "candidates" in totals:
        values["train/candidates_per_ray"] = totals["candidates"] / rays
    return values


def _check_names(components: Sequence[Component]) -> None:
    """Raises ValueError unless each component has an entry of its own in checkpoints."""
    names = [component.name for component in components]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"components must have names of their own, got {', '.join(map(repr, twice))}")
    taken = [name for name in names if name in {*ENTRIES, *ADDED}]
    if taken:
        raise ValueError(f"components must not have the name of another entry of checkpoints, got {taken[0]!r}")
