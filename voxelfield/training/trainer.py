"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxelfield.datasets.scene import Split
from voxelfield.fields.field import RadianceField
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.grids.pyramid import initial_noise
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.rendering.visual_hull import visual_hull
from voxelfield.training.averaging import WeightAverage
from voxelfield.training.batches import PixelSampler
from voxelfield.training.checkpoint import CheckpointError, checkpoint_path, replace_checkpoints, save_checkpoint
from voxelfield.training.clock import synchronized_time
from voxelfield.training.config import OptimizerConfig, TrainerConfig
from voxelfield.training.graph import GraphedCall
from voxelfield.training.interrupt import Interrupt
from voxelfield.training.logging import Progress, RunLogger
from voxelfield.training.losses import grid_terms
from voxelfield.training.metrics import mse_to_psnr
from voxelfield.training.optimizer import Optimizers, copies_dtype
from voxelfield.training.schedules import stage_at
from voxelfield.training.step import TrainingStep
from voxelfield.training.views import evaluation_background, render_settings, view_renderer

logger = logging.getLogger(__name__)

Preview = Callable[[int], None]


class EmptyFieldError(RuntimeError):
    """Nothing is left that could be seen or trained."""


class Trainer:
    """Fits a field to a split's images.

    Args:
        field: The field, on its device, at the first stage's resolution.
        recipe: What built it.
        split: Training images and cameras.
        config: The loop's settings.
        optimizer: Adam's settings.
        log: Receives scalars.
        run_directory: Receives checkpoints.
        saved_config: The run's whole configuration, stored in checkpoints.

    Attributes:
        step: Steps done.
        train_seconds: Wall-clock seconds spent on them, without previews and checkpoints. Whoever built the field and
            this trainer may count that in beforehand.
    """

    def __init__(
        self,
        field: RadianceField,
        recipe: Recipe,
        split: Split,
        config: TrainerConfig,
        optimizer: OptimizerConfig,
        log: RunLogger,
        run_directory: Path,
        saved_config: dict[str, Any],
    ) -> None:
        self.field = field
        self.recipe = recipe
        self.device = field.grid.aabb.device
        self.config = config
        self.optimizers = Optimizers(field, optimizer, config.rates)
        self.occupancy = OccupancyGrid(config.occupancy.resolution, field.grid.aabb).to(self.device)
        self.log = log
        self.run_directory = run_directory
        self.saved_config = saved_config
        self._saved: list[Path] = []  # checkpoints that the next one replaces
        self.step = 0
        self.train_seconds = 0.0
        self._pixels = PixelSampler(split, self.device, config.supersampling)
        self._step = TrainingStep(field, self.occupancy, self._pixels, self.optimizers, config)
        self._average = WeightAverage(field, config.steps, config.average_steps)
        self._attach()

    @property
    def settings(self) -> RenderSettings:
        """How rays are sampled at the present resolution."""
        return render_settings(self.config, self.field)

    @property
    def background(self) -> Tensor:
        """The colour (3,) that views are rendered and judged over, on the field's device."""
        return evaluation_background(self.config, self.device)

    def fit(self, preview: Preview | None = None) -> bool:
        """Trains up to the configured number of steps.

        Args:
            preview: Called with the step every ``preview_every`` steps; its time does not count as training.

        Returns:
            True when done, False when interrupted; a checkpoint is written either way.

        Raises:
            FloatingPointError: The loss is not finite.
            EmptyFieldError: The field has become empty.
        """
        config = self.config
        started, before = self._now(), self.train_seconds
        with Interrupt() as interrupt, Progress(config.steps, self.step) as progress:
            pause = self._pause(progress)
            logged = 0.0
            while self.step < config.steps and not interrupt.requested:
                self._enter_stage()
                self._update_occupancy()
                self._regularise_grid()
                # On CUDA only the device knows how many rays had room.
                rays = self._step.rays if self._step.capacity is None else 0
                self._graphed()
                self.step += 1
                self._average.update(self.step)
                progress.update(self.step, psnr=self._step.psnr, rays=rays)
                if self.step % config.log_every == 0 or self.step == config.steps:
                    elapsed = self._now() - started - pause.seconds
                    self._log_scalars(before + elapsed, elapsed - logged)
                    logged = elapsed
                if _due(self.step, config.preview_every) and preview is not None:
                    with pause:
                        preview(self.step)
                if _due(self.step, config.checkpoint_every) and self.step < config.steps:
                    self.train_seconds = before + self._now() - started - pause.seconds
                    with pause:
                        self.save()
            if self.step >= config.steps:
                self._average.apply()
            self.train_seconds = before + self._now() - started - pause.seconds
        self.save()
        return self.step >= config.steps

    def renderer(self) -> FieldRenderer:
        """Returns what renders views of the field as it is now; after further steps it takes another."""
        return view_renderer(self.field, self.occupancy, self.config)

    def save(self) -> Path:
        """Writes a checkpoint from which training continues as if it had never stopped.

        It takes the place of those that this trainer wrote before, unless ``keep_checkpoints`` is set or the field is
        not finite. After the last step it holds the average of the weights, if there is one: more steps go on from
        that.
        """
        path = checkpoint_path(self.run_directory, self.step)
        save_checkpoint(
            path,
            {
                "step": self.step,
                "train_seconds": self.train_seconds,
                "rays": self._step.rays,
                "field": self.field.state_dict(),
                "occupancy": self.occupancy.state_dict(),
                "optimizer": self.optimizers.state_dict(),
                "average": self._average.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
                "config": self.saved_config,
            },
            initial_noise(self.field),
        )
        if not self.config.keep_checkpoints and self._is_finite():
            self._replace_checkpoints(path)
        return path

    def _is_finite(self) -> bool:
        """Tells whether the field can still be of use; waits for the device."""
        return all(bool(parameter.detach().sum().isfinite()) for parameter in self.field.parameters())

    def _replace_checkpoints(self, newer: Path) -> None:
        try:
            replace_checkpoints([older for older in self._saved if older != newer], newer)
        except (CheckpointError, OSError) as error:
            logger.error("%s; earlier checkpoints stay where they are", error)
            self._saved.append(newer)
        else:
            self._saved = [newer]

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Continues from a checkpoint's content; the grid takes the saved resolution and box."""
        self.field.load_state_dict(checkpoint["field"])
        self.occupancy.load_state_dict(checkpoint["occupancy"])
        self.optimizers.load_state_dict(checkpoint["optimizer"])
        self.step, self.train_seconds = checkpoint["step"], checkpoint["train_seconds"]
        self._step.resume(self.step, checkpoint["rays"])
        self._attach()
        if "average" in checkpoint:
            self._average.load_state_dict(checkpoint["average"], self.step)
        torch.set_rng_state(checkpoint["rng"].cpu())
        if self.device.type == "cuda" and checkpoint["cuda_rng"] is not None:
            torch.cuda.set_rng_state(checkpoint["cuda_rng"].cpu(), self.device)

    def _enter_stage(self) -> None:
        """Changes the grid's box and resolution if a stage starts at this step."""
        stage = self.config.stages[stage_at(self.config.stages, self.step)]
        if stage.step != self.step:
            return
        if self.step == 0:
            self._restrict_occupancy()
        if stage.crop:
            self._occupied_fraction()
        box = self.occupancy.bounds() if stage.crop else None
        self.recipe.enter_stage(self.field, stage.resolution, box, self.optimizers.grid)
        if stage.crop:
            self._restrict_occupancy()
        grid = self.field.grid
        logger.info("step %d: grid %d x %d x %d over %s", self.step, *grid.resolution, grid.aabb.tolist())
        vertices = sum(level[..., 0].numel() for level in grid.levels[: grid.active])
        self.log.scalars(self.step, {"stage/resolution": stage.resolution, "stage/vertices": vertices})
        self._attach()
        if self.step >= self.config.occupancy.start and not self._occupancy_due():
            self._refresh_occupancy()

    def _attach(self) -> None:
        """Starts afresh with what depends on the grids' shapes: their copies, active tiles, the CUDA graph."""
        self.optimizers.attach(copies_dtype(self.config.precision, self.device), self.occupancy)
        # Captured in the graph as numbers: what they are computed from must not be looked at in there.
        settings = self.settings
        self._graphed = GraphedCall(lambda: self._step.run(settings), self.device)
        self._average.restart()

    def _restrict_occupancy(self) -> None:
        """Rules out what the training images show as transparent, as finely as the present box allows."""
        aabb = self.field.grid.aabb
        x, y, z = self.occupancy.occupied.shape
        self.occupancy.restrict(visual_hull(self._pixels.alpha, self._pixels.cameras, aabb, (x, y, z)), aabb)
        if not bool(self.occupancy.occupied.any()):
            raise EmptyFieldError(
                f"the training images show nothing inside {aabb.tolist()}: check scene.aabb and that the poses are "
                "camera to world in OpenGL axes"
            )

    def _update_occupancy(self) -> None:
        if self._occupancy_due():
            self._refresh_occupancy()

    def _occupancy_due(self) -> bool:
        config = self.config.occupancy
        return self.step >= config.start and (self.step - config.start) % config.every == 0

    @torch.no_grad()
    def _refresh_occupancy(self) -> None:
        step, threshold = self.settings.step, self.config.occupancy.threshold
        with self._step.autocast():
            self.recipe.refresh_occupancy(self.field, self.occupancy, step, threshold)
        self.optimizers.restrict(self.occupancy)

    def _regularise_grid(self) -> None:
        """Adds the gradients of the terms on the grid itself, where the step's own will be added."""
        terms = grid_terms(self.config.loss, self.recipe, self.field, self.step)
        if terms:
            (self.config.loss_scale * torch.stack(list(terms.values())).sum()).backward()
            self._step.count(terms)

    def _log_scalars(self, seconds: float, since_last: float) -> None:
        totals = self._step.totals.read()
        steps = totals.pop("steps")
        values = {name: total / steps for name, total in totals.items() if name.startswith("loss/")}
        # Where the field is NaN no sample shows, and the loss of what is left may be finite.
        if not self._is_finite() or not all(math.isfinite(value) for value in values.values()):
            raise FloatingPointError(
                f"step {self.step}: the loss or the field was not finite since the last record, now {values}; lower "
                "optimizer.grid_lr or optimizer.network_lr, or trainer.loss_scale where gradients are float16"
            )
        if totals["rays"] < steps * self.config.supersampling**2:
            room = f"trainer.visible_samples={self.config.visible_samples}"
            if "candidates" in totals:
                room = f"trainer.candidate_samples={self.config.candidate_samples} and {room}"
            raise ValueError(f"step {self.step}: not one pixel's samples fit into {room}; raise that")
        occupancy = self._occupied_fraction()
        rays = totals["rays"]
        values["train/psnr"] = float(mse_to_psnr(torch.tensor(values["loss/photometric"])))
        values["train/rays_per_step"] = totals["rays"] / steps
        values["train/samples_per_ray"] = totals["samples"] / rays
        if "candidates" in totals:
            values["train/candidates_per_ray"] = totals["candidates"] / rays
        values["train/occupancy"] = occupancy
        values["train/rays_per_second"] = totals["rays"] / since_last
        values["train/seconds"] = seconds
        values |= {f"lr/{name}": rate for name, rate in self.optimizers.rates().items()}
        if self.device.type == "cuda":
            values["gpu/allocated_GiB"] = torch.cuda.memory_allocated(self.device) / 2**30
            values["gpu/peak_GiB"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.log.scalars(self.step, values)

    def _occupied_fraction(self) -> float:
        """Returns the share of occupied cells; raises if there is none."""
        fraction = self.occupancy.fraction()
        if fraction == 0:
            raise EmptyFieldError(
                f"step {self.step}: the field has become empty everywhere. Lower trainer.occupancy.threshold or "
                "optimizer.grid_lr, raise model.density.initial, or check that scene.aabb holds the scene"
            )
        return fraction

    def _now(self) -> float:
        return synchronized_time(self.device)

    def _pause(self, progress: Progress) -> _Pause:
        return _Pause(self._now, progress)


class _Pause:
    """Adds up the time spent inside its ``with`` blocks, which training is not charged for."""

    def __init__(self, now: Callable[[], float], progress: Progress) -> None:
        self.seconds = 0.0
        self._now = now
        self._progress = progress
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._began = self._now()
        self._stack.enter_context(self._progress.paused())

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self.seconds += self._now() - self._began


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
