"""The training loop."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxelfield.cameras import Cameras
from voxelfield.datasets.scene import Split
from voxelfield.fields import RadianceField
from voxelfield.occupancy import OccupancyGrid
from voxelfield.rendering import Rendering, RenderSettings, View, render, render_view
from voxelfield.training.batches import PixelSampler, background_for
from voxelfield.training.checkpoint import checkpoint_path, save_checkpoint
from voxelfield.training.config import OptimizerConfig, TrainerConfig
from voxelfield.training.interrupt import Interrupt
from voxelfield.training.logging import Progress, RunLogger
from voxelfield.training.losses import grid_terms, rendering_terms
from voxelfield.training.metrics import mse_to_psnr
from voxelfield.training.optimizer import make_optimizer, scale_learning_rates
from voxelfield.training.schedules import cubic_voxels, exponential_decay, stage_at
from voxelfield.visual_hull import visual_hull

logger = logging.getLogger(__name__)

Preview = Callable[[int], None]


class EmptyFieldError(RuntimeError):
    """Nothing is left that could be seen or trained."""


class Trainer:
    """Fits a field to a split's images.

    Args:
        field: The field, on its device, at the first stage's resolution.
        split: Training images and cameras.
        config: The loop's settings.
        optimizer: Adam's settings.
        log: Receives scalars.
        run_directory: Receives checkpoints.
        saved_config: The run's whole configuration, stored in checkpoints.

    Attributes:
        step: Steps done.
        train_seconds: Wall-clock seconds spent on them, without previews and checkpoints.
    """

    def __init__(
        self,
        field: RadianceField,
        split: Split,
        config: TrainerConfig,
        optimizer: OptimizerConfig,
        log: RunLogger,
        run_directory: Path,
        saved_config: dict[str, Any],
    ) -> None:
        self.field = field
        self.device = field.grid.features.device
        self.config = config
        self.optimizer_config = optimizer
        self.optimizer = make_optimizer(field, optimizer)
        # float16 gradients underflow without scaling; the wider exponents of the others need none.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "float16")
        self.occupancy = OccupancyGrid(config.occupancy.resolution, field.grid.aabb).to(self.device)
        self.log = log
        self.run_directory = run_directory
        self.saved_config = saved_config
        self.step = 0
        self.train_seconds = 0.0
        # Once the field is NaN no sample is visible and the loss is finite again: remember the worst.
        self._highest_loss = torch.zeros((), device=self.device)
        self._split = split
        self._pixels = PixelSampler(split, self.device)
        self._rays = min(config.max_rays, max(1, config.samples // 64))

    @property
    def settings(self) -> RenderSettings:
        """How rays are sampled at the present resolution."""
        render_config = self.config.render
        return RenderSettings(
            step=render_config.voxels_per_step * float(self.field.grid.voxel_size.min()),
            min_transmittance=render_config.min_transmittance,
            min_weight=render_config.min_weight,
        )

    @property
    def background(self) -> Tensor:
        """The colour (3,) that views are rendered and judged over, on the field's device."""
        return background_for(self.config.evaluation_background, 1, self.device)[0]

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
            settings = self.settings
            rays_since_log, logged = 0, 0.0
            while self.step < config.steps and not interrupt.requested:
                if self._enter_stage():
                    settings = self.settings
                self._update_occupancy(settings)
                terms, rendering, rays = self._train_step(settings)
                self.step += 1
                psnr = mse_to_psnr(terms["photometric"].detach())
                progress.update(self.step, psnr=psnr, rays=rays)
                rays_since_log += rays
                if self.step % config.log_every == 0 or self.step == config.steps:
                    elapsed = self._now() - started - pause.seconds
                    rate = rays_since_log / (elapsed - logged)
                    self._log_scalars(
                        terms, psnr, rendering, rays, {"rays_per_second": rate, "seconds": before + elapsed}
                    )
                    rays_since_log, logged = 0, elapsed
                if _due(self.step, config.preview_every) and preview is not None:
                    with pause:
                        preview(self.step)
                if _due(self.step, config.checkpoint_every) and self.step < config.steps:
                    self.train_seconds = before + self._now() - started - pause.seconds
                    with pause:
                        self.save()
            self.train_seconds = before + self._now() - started - pause.seconds
        self.save()
        return self.step >= config.steps

    def render_view(self, cameras: Cameras, camera: int) -> View:
        """Renders a view over the evaluation background, in the training precision."""
        with self._autocast():
            return render_view(
                self.field,
                cameras.to(self.device),
                camera,
                self.occupancy,
                self.settings,
                self.background,
                self.config.chunk,
            )

    def save(self) -> Path:
        """Writes a checkpoint from which training continues as if it had never stopped."""
        path = checkpoint_path(self.run_directory, self.step)
        save_checkpoint(
            path,
            {
                "step": self.step,
                "train_seconds": self.train_seconds,
                "rays": self._rays,
                "field": self.field.state_dict(),
                "occupancy": self.occupancy.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
                "config": self.saved_config,
            },
        )
        return path

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Continues from a checkpoint's content; the grid takes the saved resolution and box."""
        self.field.load_state_dict(checkpoint["field"])
        self.occupancy.load_state_dict(checkpoint["occupancy"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if checkpoint["scaler"]:  # empty unless the run was in float16
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.step, self.train_seconds = checkpoint["step"], checkpoint["train_seconds"]
        self._rays = checkpoint["rays"]
        torch.set_rng_state(checkpoint["rng"].cpu())
        if self.device.type == "cuda" and checkpoint["cuda_rng"] is not None:
            torch.cuda.set_rng_state(checkpoint["cuda_rng"].cpu(), self.device)

    def _train_step(self, settings: RenderSettings) -> tuple[dict[str, Tensor], Rendering, int]:
        config = self.config
        factor = exponential_decay(self.step, config.steps, self.optimizer_config.final_lr)
        scale_learning_rates(self.optimizer, factor)
        rays, rgba = self._pixels.draw(self._rays, self.field.grid.aabb)
        background = background_for(config.background, len(rays), self.device)
        truth = rgba[:, :3] * rgba[:, 3:] + background * (1 - rgba[:, 3:])
        with self._autocast():
            rendering = render(self.field, rays, self.occupancy, settings, jitter=True)
        terms = rendering_terms(config.loss, rendering, rendering.over(background), truth)
        terms |= grid_terms(config.loss, self.field.grid, self.step)
        loss = torch.stack(list(terms.values())).sum()
        torch.maximum(self._highest_loss, loss.detach(), out=self._highest_loss)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        drawn = self._rays
        # As space empties, the same number of samples pays for more rays.
        wanted = drawn * config.samples / max(len(rendering.samples), 1)
        self._rays = int(min(config.max_rays, max(drawn * 0.8, min(drawn * 1.25, wanted)) + 1))
        return terms, rendering, drawn

    def _enter_stage(self) -> bool:
        """Changes the grid's box and resolution if a stage starts at this step."""
        stage = self.config.stages[stage_at(self.config.stages, self.step)]
        if stage.step != self.step:
            return False
        grid = self.field.grid
        if self.step == 0:
            self._confine_occupancy()
        if stage.crop:
            grid.crop(self.occupancy.bounds(), self.optimizer)
            self._confine_occupancy()
        resolution = cubic_voxels(grid.aabb, stage.resolution)
        if resolution != grid.resolution:
            grid.upsample(resolution, self.optimizer)
        logger.info("step %d: grid %d x %d x %d over %s", self.step, *grid.resolution, grid.aabb.tolist())
        vertices = grid.features[..., 0].numel()
        self.log.scalars(self.step, {"stage/resolution": stage.resolution, "stage/vertices": vertices})
        if self.step >= self.config.occupancy.start:
            self._refresh_occupancy(self.settings)
        return True

    def _confine_occupancy(self) -> None:
        """Rules out what the training images show as transparent, as finely as the present box allows."""
        aabb = self.field.grid.aabb
        x, y, z = self.occupancy.occupied.shape
        alpha = self._split.images[..., 3]
        self.occupancy.confine(visual_hull(alpha, self._split.cameras.to(self.device), aabb, (x, y, z)), aabb)
        if not bool(self.occupancy.occupied.any()):
            raise EmptyFieldError(
                f"the training images show nothing inside {aabb.tolist()}: check scene.aabb and that the poses are "
                "camera to world in OpenGL axes"
            )

    def _update_occupancy(self, settings: RenderSettings) -> None:
        config = self.config.occupancy
        if self.step >= config.start and (self.step - config.start) % config.every == 0:
            self._refresh_occupancy(settings)

    @torch.no_grad()
    def _refresh_occupancy(self, settings: RenderSettings) -> None:
        self.occupancy.update(
            self.field.vertex_density(), self.field.grid.aabb, settings.step, self.config.occupancy.threshold
        )
        if not bool(self.occupancy.occupied.any()):
            raise EmptyFieldError(
                f"step {self.step}: the field has become empty everywhere. Lower trainer.occupancy.threshold or "
                "optimizer.grid_lr, raise model.density.initial, or check that scene.aabb holds the scene"
            )

    def _log_scalars(
        self, terms: dict[str, Tensor], psnr: Tensor, rendering: Rendering, rays: int, speed: dict[str, float]
    ) -> None:
        values = {f"loss/{name}": float(term.detach()) for name, term in terms.items()}
        if not math.isfinite(float(self._highest_loss)):
            raise FloatingPointError(
                f"step {self.step}: the loss was not finite since the last record, now {values}; lower "
                "optimizer.grid_lr or optimizer.network_lr, or use trainer.precision=float32"
            )
        values["train/psnr"] = float(psnr)
        values["train/rays_per_step"] = rays
        values["train/samples_per_ray"] = len(rendering.samples) / rays
        values["train/marched_per_ray"] = rendering.marched / rays
        values["train/occupancy"] = self.occupancy.fraction()
        values["train/rays_per_second"] = speed["rays_per_second"]
        values["train/seconds"] = speed["seconds"]
        for index, group in enumerate(self.optimizer.param_groups):
            values[f"lr/{('grid', 'network')[index]}"] = group["lr"]
        if self.device.type == "cuda":
            values["gpu/allocated_GiB"] = torch.cuda.memory_allocated(self.device) / 2**30
            values["gpu/peak_GiB"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.log.scalars(self.step, values)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.config.precision))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

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
