"""The training session: the training loop behind both the Python API and the command line."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from voxelfield import _library
from voxelfield.config.parsing import parse
from voxelfield.datasets.poses import check_cameras_see, likely_mistake
from voxelfield.datasets.scene import Scene
from voxelfield.datasets.transparency import check_visible
from voxelfield.devices import choose_device
from voxelfield.evaluation.evaluation import Evaluation
from voxelfield.fields.field import RadianceField
from voxelfield.messages import clipped
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.registry import model_names
from voxelfield.ops._errors import shown
from voxelfield.rendering.march import RenderSettings, Sampler, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.rendering.visible_cells import count_visible_samples
from voxelfield.training.averaging import WeightAverage
from voxelfield.training.batch import Batch
from voxelfield.training.batches import PixelSampler, opaque_where_masked
from voxelfield.training.cameras.camera_refinement import CameraRefinement, RefinedPoses
from voxelfield.training.cameras.exposure import AffineExposure, ExposureCorrection
from voxelfield.training.cameras.lost_cameras import LostCameras
from voxelfield.training.cameras.refined_cameras import RefinedCameras
from voxelfield.training.clock import Pause, synchronized_time
from voxelfield.training.config import (
    CameraConfig,
    OptimizerConfig,
    RunConfig,
    SceneConfig,
    TrainerConfig,
    complete,
)
from voxelfield.training.fields import untrained_field, untrained_model
from voxelfield.training.graph import GraphedCall
from voxelfield.training.interrupt import Interrupt
from voxelfield.training.logs.logging import FailsafeLogger, NullLogger, RunLogger
from voxelfield.training.logs.progress import Progress
from voxelfield.training.logs.records import has_diverged, log_preview, mean_losses, rates_of_steps
from voxelfield.training.losses import STRUCTURE, grid_terms, grid_weight
from voxelfield.training.memory import (
    MemoryEstimate,
    check_memory,
    estimate_memory,
    explain_shortage,
    images_stay_on_host,
)
from voxelfield.training.occupied_space import OccupiedSpace
from voxelfield.training.optimizer import Optimizers, copies_dtype
from voxelfield.training.part import Loss, Part
from voxelfield.training.schedules import reached_resolution, stage_at
from voxelfield.training.state.checkpoint import check_state
from voxelfield.training.state.fingerprint import changes, fingerprint
from voxelfield.training.state.finished import changed_settings
from voxelfield.training.state.run_directory import RunDirectoryLock
from voxelfield.training.state.saving import CheckpointWriter
from voxelfield.training.step import TrainingStep
from voxelfield.training.structure import structure_weights
from voxelfield.training.trained_model import TrainedModel
from voxelfield.warps.choice import WarpConfig
from voxelfield.warps.warp import Warp

logger = logging.getLogger(__name__)

# Fine levels get blocks where a sample has at least this compositing weight in one of the examined pixels. There are
# this many of them along the shorter side of the training images.
_MIN_WEIGHT_WITH_DETAIL = 0.02
_PIXELS_LOOKED_AT = 160

# Settings that a run may change when it is resumed, which is worth a warning.
_RESUMED = ("optimizer.", "trainer.", "camera.", "seed")

# What every checkpoint contains.
_SAVED = ("step", "train_seconds", "rays", "field", "occupancy", "optimizer", "rng", "cuda_rng", "config")

# Entries of checkpoints that are not states of parts either. Old checkpoints lack some of them, and the file adds
# "format" and "voxelfield".
_ALSO_SAVED = ("untrained_error", "diverged", "average", "data", "format", "voxelfield")

# The settings that choose parts with a state, and their values if they do.
_SETTINGS_OF_PARTS = {"cameras": ("camera.name", "refine"), "exposure": ("trainer.exposure", "affine")}

Hook = Callable[["Session"], None]
"""A function that a session calls with itself as the argument."""


class Session:
    """Fits a field to the training images of a scene.

    Settings that are not given default to those of ``python train.py model=NAME`` on the same device; for an
    unbounded scene, to those for photographs. Hooks are called between two steps, on the training thread; they may
    read any state, log, save, or raise to stop training.

    Args:
        scene: Images and cameras, with a split named ``train``.
        model: The model: a model, or the name of one (``pyramid``, ``sh``, ``dense``, or one that a package announces).
        trainer: Settings of the training loop, or the name of a file in ``configs/trainer``.
        optimizer: Settings of Adam, or the name of a file in ``configs/optimizer``.
        camera: Settings of camera refinement, such as ``CameraConfig(name="refine")``; None keeps the given cameras.
        warp: The warp of the field, or settings of its choice; None chooses it from the scene
            (:meth:`voxelfield.models.model_config.ModelConfig.choose_warp`).
        losses: Loss terms that are added to the model's, by name; each maps outputs and batch to a scalar that is
            already multiplied by its weight (:data:`voxelfield.training.part.Loss`). A term of the name of another one,
            such as ``photometric``, replaces it.
        parts: What else joins each step (:class:`voxelfield.training.part.Part`), in this order.
        sampler: Places samples on the rays of training (:class:`voxelfield.rendering.march.Sampler`).
        device: Device on which to train: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.
        seed: Seed of torch's random number generators, set before the field is built.
        output: Folder for checkpoints; None writes no files.
        logger: Receives scalars and images; None discards them.
        on_step: Called after every step; its time counts as training time. On CUDA, steps are asynchronous, so reading
            a tensor synchronises.
        on_stage: Called when the grid has changed its box or resolution, and at the first step.
        on_preview: Called every ``trainer.preview_every`` steps, after :meth:`preview`; not counted as training time.

    Attributes:
        scene: The scene, as given.
        config: All settings, after validation.
        device: Device on which training runs.
        model: The field, the occupied cells, and how rays are sampled.
        parts: What joins each step: camera refinement and exposure corrections as configured, then the given parts.
        optimizers: The optimizers of the field.
        refinement: The refinement of the training cameras, or None.
        output: The output folder, as given.
        step: Number of steps done.
        diverged: Whether, at the last record, training pixels were rendered clearly worse than by the untrained field.
        train_seconds: Wall-clock seconds spent on building the field and on these steps, without previews and
            checkpoints.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A setting is not allowed, no training camera sees any part of the scene's box, or training needs
            more memory than is free on the GPU; the message names the key.
        torch.OutOfMemoryError: Memory ran out on the CPU, or on the GPU despite the estimate; the message states the
            memory that training needs and which settings to reduce.

    Example:
        >>> session = Session(scene, "pyramid", trainer="fast", output="runs/mine")  # doctest: +SKIP
        >>> session.fit()  # doctest: +SKIP
        >>> session.evaluate().psnr, session.result().render(scene.test.cameras)  # doctest: +SKIP
    """

    def __init__(
        self,
        scene: Scene,
        model: ModelConfig | str = "pyramid",
        *,
        trainer: TrainerConfig | str | None = None,
        optimizer: OptimizerConfig | str | None = None,
        camera: CameraConfig | None = None,
        warp: WarpConfig | Warp | None = None,
        losses: Mapping[str, Loss] | None = None,
        parts: Sequence[Part] = (),
        sampler: Sampler = visible_samples,
        device: torch.device | str = "auto",
        seed: int = 0,
        output: Path | str | None = None,
        logger: RunLogger | None = None,
        on_step: Hook | None = None,
        on_stage: Hook | None = None,
        on_preview: Hook | None = None,
    ) -> None:
        _check_types(scene, model, trainer, optimizer, camera)
        if warp is None or isinstance(warp, WarpConfig):
            warp = _model_config(model).choose_warp(scene, parse(WarpConfig, warp or {}, "warp"))
        config = complete(model, trainer, optimizer, camera, device=str(device), seed=seed, scene=scene, warp=warp)
        self._extend(losses, parts, sampler)
        self._begin(scene, config, warp, output, logger, (on_step, on_stage, on_preview))

    @classmethod
    def from_config(
        cls,
        scene: Scene,
        config: RunConfig,
        *,
        warp: Warp | None = None,
        losses: Mapping[str, Loss] | None = None,
        parts: Sequence[Part] = (),
        sampler: Sampler = visible_samples,
        output: Path | str | None = None,
        logger: RunLogger | None = None,
        on_step: Hook | None = None,
        on_stage: Hook | None = None,
        on_preview: Hook | None = None,
    ) -> Session:
        """Creates a session from the settings of a whole run, as :func:`voxelfield.training.config.preset` returns.

        Args:
            scene: As for the constructor.
            config: All settings. Those of scene and data are only recorded in the results, because ``scene`` is given.
            warp: The warp of the field; None chooses it with the settings in ``config.warp``.
            losses: As for the constructor.
            parts: As for the constructor.
            sampler: As for the constructor.
            output: As for the constructor.
            logger: As for the constructor.
            on_step: As for the constructor.
            on_stage: As for the constructor.
            on_preview: As for the constructor.

        Raises:
            ValueError: As for the constructor.
        """
        session = cls.__new__(cls)
        session._extend(losses, parts, sampler)
        config = parse(RunConfig, config)
        if warp is None:
            warp = config.model.choose_warp(scene, config.warp)
        session._begin(scene, config, warp, output, logger, (on_step, on_stage, on_preview))
        return session

    def _extend(self, losses: Mapping[str, Loss] | None, parts: Sequence[Part], sampler: Sampler) -> None:
        """Keeps what the caller adds to the training step."""
        for name, loss in (losses or {}).items():
            if not callable(loss):
                raise TypeError(f"losses[{name!r}] must be a function of outputs and batch, got {shown(loss)}")
        for index, part in enumerate(parts):
            if not isinstance(part, Part):
                raise TypeError(f"parts[{index}] must be a voxelfield.training.part.Part, got {shown(part)}")
        if not callable(sampler):
            raise TypeError(f"sampler must be a function like visible_samples, got {shown(sampler)}")
        self._losses, self._parts, self._sampler = dict(losses or {}), list(parts), sampler

    def _begin(
        self,
        scene: Scene,
        config: RunConfig,
        warp: Warp | None,
        output: Path | str | None,
        log: RunLogger | None,
        hooks: tuple[Hook | None, Hook | None, Hook | None],
    ) -> None:
        if output is not None and not isinstance(output, (str, os.PathLike)):
            raise TypeError(f"output must be a path or None, got {shown(output)}")
        if len(scene.train) == 0:
            raise ValueError("scene.train must have at least one view, got none")
        if scene.train.cameras.c2w.is_cuda:
            raise ValueError(f"scene.train.cameras must be on the CPU, got {scene.train.cameras.c2w.device}")
        low, high = scene.aabb.tolist() if warp is None else warp.aabb
        config.scene, config.warp = SceneConfig(scene.name, (tuple(low), tuple(high))), WarpConfig.of(warp)
        if config.camera.refines:
            config.trainer = config.camera.schedule(config.trainer)
        check_visible(scene.train)
        if warp is None:
            check_cameras_see(scene.train.cameras, scene.aabb)
        mistake = likely_mistake(scene.train.cameras.c2w)
        if mistake is not None:
            logger.warning("%s", mistake)
        self.scene = scene
        self.config = config

        self.device = choose_device(config.device)
        self.log = NullLogger() if log is None else log
        self.diverged = False
        self._pause: Pause | None = None
        self.output = None if output is None else Path(output)
        self._on_step, self._on_stage, self._on_preview = hooks
        self._writer = (
            None if self.output is None else CheckpointWriter(self.output, config.trainer.keep_checkpoints, self._flush)
        )
        self._writing = contextlib.ExitStack()
        if self.output is not None:
            # Checkpoints need the fingerprint; computing it in the background keeps them from waiting for it.
            with_images = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fingerprint")
            self._fingerprint = with_images.submit(fingerprint, scene.train)
            with_images.shutdown(wait=False)
        _library.ensure_loaded(self.device.type)
        self._images_on_host = False
        self._check_memory()
        with explain_shortage(self.estimate_memory, self.device):
            self._build()

    def _build(self) -> None:
        config, scene = self.config, self.scene
        torch.manual_seed(config.seed)
        started = self._now()
        trainer = config.trainer
        self.model = untrained_model(config, self.device)
        self._pixels = PixelSampler(
            scene.train,
            self.device,
            trainer.supersampling,
            trainer.patches,
            trainer.patch_size,
            on_host=self._images_on_host,
        )
        if trainer.loss.structure > 0:
            images = opaque_where_masked(scene.train)
            self._pixels.carry(STRUCTURE, structure_weights(images, self.device, self._pixels.cameras.sizes))
        self.refinement = self._begin_refinement()
        self.parts = [*self._configured_parts(), *self._parts]
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError(f"parts must have names of their own, got {', '.join(map(repr, names))}")
        groups = {name: group for part in self.parts for name, group in part.param_groups().items()}
        self.optimizers = Optimizers(self.model, config.optimizer, trainer.rates, groups)
        self._occupied = OccupiedSpace(self.model, trainer.occupancy)
        self.step = 0
        self._recorded_seconds = 0.0
        searched = config.camera.search_poses if config.camera.refines else 0
        self._lost_cameras = LostCameras(scene.train, trainer, searched) if searched > 0 else None
        self._step = TrainingStep(
            self.model,
            self._pixels,
            self.optimizers,
            trainer,
            parts=self.parts,
            losses=self._losses,
            sampler=self._sampler,
        )
        # Infinite until the first step has been taken, so that training does not count as diverged before.
        self._untrained_error = torch.full_like(self._step.error, math.inf)
        self._average = WeightAverage(self.model, trainer.steps, trainer.average_steps)
        self._attach()
        self.train_seconds = self._now() - started

    def _configured_parts(self) -> Iterator[Part]:
        """Yields the parts that the configuration asks for."""
        config = self.config
        if self.refinement is not None:
            yield RefinedPoses(self.refinement)
        if config.trainer.exposure == "affine":
            exposure = AffineExposure(len(self.scene.train)).to(self.device)
            yield ExposureCorrection(exposure, config.optimizer.exposure_lr, config.trainer.loss.exposure)

    @property
    def field(self) -> RadianceField:
        """The field of the model."""
        return self.model.field

    @property
    def occupancy(self) -> OccupancyGrid:
        """The occupied cells of the model."""
        return self.model.occupancy

    @property
    def exposure(self) -> AffineExposure | None:
        """Learned exposure corrections of the training images; None with ``trainer.exposure=none``."""
        return next((part.exposure for part in self.parts if isinstance(part, ExposureCorrection)), None)

    def _begin_refinement(self) -> CameraRefinement | None:
        """Returns the refinement of the cameras, or None if the cameras are not refined."""
        config, steps, warp = self.config.camera, self.config.trainer.steps, self.model.warp
        if not config.refines:
            return None
        logger.info(
            "cameras are refined: rays are computed by torch operations, no visual hull is used, and the stages are "
            "those of %s",
            "camera.stages" if config.stages else "trainer.stages",
        )
        return CameraRefinement(
            self._pixels.cameras,
            torch.tensor(self.config.scene.aabb, device=self.device).mean(dim=0),
            steps=steps,
            pose_lr=config.pose_lr,
            focal_lr=config.focal_lr if config.focal else None,
            final_factor=config.final_factor,
            warm_up=round(config.warm_up * steps),
            pose_from=config.kept_steps(steps, forward=warp is not None and warp.is_forward_facing),
            focal_from=round(config.focal_from * steps),
            unit=1.0 if warp is None else warp.motion_unit,
        )

    def _check_memory(self) -> None:
        """Raises if training cannot fit in memory, before anything is allocated, and decides where images are kept."""
        if self.device.type != "cuda":
            return
        estimate = self.estimate_memory()
        if images_stay_on_host(self.config.trainer.images, estimate, self.device):
            logger.info(
                "training images stay in pinned host memory, from which the GPU reads the pixels that it samples"
            )
            self._images_on_host = True
            estimate = self.estimate_memory()
        logger.info("training needs about %s of GPU memory", estimate)
        check_memory(estimate, self.device)

    def estimate_memory(self) -> MemoryEstimate:
        """Estimates the memory that training needs at its final resolution."""
        config, train = self.config.trainer, self.scene.train
        shapes = untrained_field(self.config, "meta")
        on_host = self._images_on_host
        return estimate_memory(shapes, self.config.model, config, train, self.device.type, images_on_host=on_host)

    def fit(self, *, wait: bool = True) -> bool:
        """Trains up to the configured number of steps. Ctrl-C, SIGTERM or SIGHUP stops training after the current step.

        Args:
            wait: Return only when the last checkpoint is on disk. If False, it is copied and written in the background,
                and :meth:`wait` must be called before the field is changed and before the program ends.

        Returns:
            True when done, False when interrupted. A checkpoint is written in both cases if there is an output folder.

        Raises:
            FloatingPointError: The loss is not finite.
            EmptyFieldError: The field has become empty.
            OSError: The last checkpoint could not be written, or, with ``trainer.checkpoint_errors=stop``, any other.
            DirectoryInUseError: Another process is writing to the output folder.
            torch.OutOfMemoryError: As for the constructor.
        """
        for _ in self._train(wait):
            pass
        return self.step >= self.config.trainer.steps

    def __iter__(self) -> Iterator[Batch]:
        """Trains as :meth:`fit` does and yields the batch of each step after it, until training ends.

        Leaving the loop earlier ends training as an interruption does: with a checkpoint, if there is an output folder.
        On CUDA, the next step overwrites the tensors of a batch.
        """
        yield from self._train(wait=True)

    def train_step(self) -> Batch:
        """Takes one step, for callers who own the loop, and returns its batch.

        Everything that training does between steps is included: stages, occupied cells, the average of the weights and
        records. Previews, checkpoints and the progress bar are left to the caller (:meth:`preview`, :meth:`save`).
        ``train_seconds`` grows by the time that the call takes on the host.

        Raises:
            ValueError: All steps of the schedule have been taken.
            FloatingPointError: As for :meth:`fit`.
            EmptyFieldError: As for :meth:`fit`.
        """
        config = self.config.trainer
        if self.step >= config.steps:
            raise ValueError(f"session.step must be below trainer.steps, {config.steps}, got {self.step}")
        started = time.perf_counter()
        batch = self._advance()
        self.train_seconds += time.perf_counter() - started
        if self._record_is_due():
            self._log_scalars(self.train_seconds, self.train_seconds - self._recorded_seconds)
            self._recorded_seconds = self.train_seconds
        if self.step >= config.steps:
            self._average.apply()
        return batch

    def _advance(self) -> Batch:
        """Takes one step."""
        self._enter_stage()
        if self._occupied.is_due(self.step):
            self._refresh_occupancy()
        self._regularise_grid()
        self._graphed()
        if self.step == 0:
            self._untrained_error.copy_(self._step.error)
        self.step += 1
        self._average.update(self.step)
        self._call(self._on_step)
        return self._step.batch

    def _record_is_due(self) -> bool:
        config = self.config.trainer
        return self.step % config.log_every == 0 or self.step == config.steps

    def _train(self, wait: bool) -> Iterator[Batch]:
        """Takes the remaining steps with records, previews and checkpoints; yields the batch of each step."""
        config = self.config.trainer
        started, before = self._now(), self.train_seconds
        with (
            self._holding_output(wait),
            explain_shortage(self.estimate_memory, self.device),
            Interrupt() as interrupt,
            Progress(config.steps, self.step) as progress,
        ):
            pause = self._pause = Pause(self._now, progress.paused)
            logged = 0.0
            with contextlib.suppress(GeneratorExit):
                while self.step < config.steps and not interrupt.requested:
                    # On CUDA the number of rays that fit is known only to the device.
                    rays = self._step.rays if self._step.capacity is None else 0
                    batch = self._advance()
                    progress.update(self.step, psnr=self._step.psnr, rays=rays)
                    if self._record_is_due():
                        elapsed = self._now() - started - pause.seconds
                        self._log_scalars(before + elapsed, elapsed - logged)
                        logged = elapsed
                    if _due(self.step, config.preview_every):
                        with pause:
                            self.preview()
                            self._call(self._on_preview)
                    if _due(self.step, config.checkpoint_every) and self.step < config.steps:
                        self.train_seconds = before + self._now() - started - pause.seconds
                        with pause:
                            self._save(optional=config.checkpoint_errors == "continue")
                    yield batch
            if self.step >= config.steps:
                self._average.apply()
            self.train_seconds = before + self._now() - started - pause.seconds
            # No CUDA graph is captured from here on, so another thread may use the device.
            self._save(settled=True)
            if wait:
                self.wait()

    def off_the_clock(self) -> contextlib.AbstractContextManager[object]:
        """Returns a context for hooks whose time is excluded from ``train_seconds`` and from the logged rates.

        Synchronises with the device at its beginning and end.
        """
        return contextlib.nullcontext() if self._pause is None else self._pause

    @property
    def log(self) -> RunLogger:
        """The logger for scalars and images. If it fails, the session stops recording and continues training."""
        return self._log

    @log.setter
    def log(self, log: RunLogger) -> None:
        self._log = log
        self._records = FailsafeLogger(log)

    @property
    def checkpoint(self) -> Path | None:
        """The last valid checkpoint on disk, or the one from which training was resumed; None if there is neither."""
        return None if self._writer is None else self._writer.newest

    @property
    def settings(self) -> RenderSettings:
        """The sampling settings at the current resolution."""
        return self.model.settings

    @property
    def background(self) -> Tensor:
        """The background colour (3,) for rendering and evaluating views, on the field's device."""
        return self.model.background

    def renderer(self) -> FieldRenderer:
        """Returns a renderer of the field's current state; after further steps, request a new one."""
        return self.model.renderer()

    def result(self) -> TrainedModel:
        """Returns the current state as a :class:`TrainedModel` for rendering and saving.

        Further steps change its field.
        """
        return TrainedModel(self.model, copy.deepcopy(self.config), self.step, self.cameras)

    @property
    def cameras(self) -> RefinedCameras | None:
        """The given and the refined training cameras, on the CPU; None if they are not refined."""
        if self.refinement is None:
            return None
        return RefinedCameras(self.refinement.given().to("cpu"), self.refinement.refined().to("cpu"))

    def preview(self) -> None:
        """Logs render | truth | error | depth for fixed test views, and their PSNR; no-op without a test split."""
        split = self.scene.splits.get("test")
        if split is not None:
            views, cameras = self.config.trainer.preview_views, self.cameras
            split = split if cameras is None else cameras.follow_split(split)
            log_preview(self.renderer(), split, self.background, self._records, self.step, views)

    def evaluate(
        self, split: str = "test", *, views: int | None = None, images: Path | str | None = None, progress: bool = True
    ) -> Evaluation:
        """Evaluates the current state against views of the scene.

        Args:
            split: Name of the split.
            views: Number of views to evaluate, spread evenly; None for all.
            images: Folder to which the rendered views are written as PNG; None writes none.
            progress: Show a progress bar if the standard error stream is a terminal.

        Raises:
            ValueError: The scene has no such split, or ``views`` is below 1.
            FileExistsError: ``images`` holds an image of a view's name that voxelfield has not written.
            FloatingPointError: A rendered image contains NaN or infinity.
        """
        return self.result().evaluate(self.scene.split(split), views=views, images=images, progress=progress)

    def save(self, *, wait: bool = True) -> Path | None:
        """Writes a checkpoint from which training can be resumed as if it had never stopped.

        It replaces the checkpoints that this session wrote before, unless ``trainer.keep_checkpoints`` is set. If the
        field is not finite, the checkpoint replaces none and is named ``not_finite_<step>.pt``; it is for inspection
        and is ignored when a run directory is resumed. After the last step, the checkpoint contains the averaged
        weights, if averaging is enabled; further steps continue from these.

        Args:
            wait: Return only when the file is on disk; otherwise it is written in the background (:meth:`wait`).

        Returns:
            The file, or None without an output folder.

        Raises:
            OSError: The checkpoint, or the previous one, could not be written.
            DirectoryInUseError: Another process is writing to the output folder.
        """
        with self._holding_output(wait):
            path = self._save()
            if wait:
                self.wait()
        return path

    @contextlib.contextmanager
    def _holding_output(self, wait: bool) -> Iterator[None]:
        """Locks the output folder for a block and, unless the block waits for its files, until :meth:`wait`."""
        if self.output is None:
            yield
            return
        with RunDirectoryLock.acquire(self.output, "output"):
            yield
            if not wait:
                self._writing.enter_context(RunDirectoryLock.acquire(self.output, "output"))

    def _save(self, *, settled: bool = False, optional: bool = False) -> Path | None:
        """Like :meth:`save`, but does not wait; the arguments are as for :meth:`CheckpointWriter.save`."""
        if self._writer is None:
            return None
        finite = self._is_finite()
        return self._writer.save(self.step, self._state(), finite=finite, settled=settled, optional=optional)

    def _flush(self) -> None:
        """Flushes the log, because a run that is resumed from a checkpoint does not log earlier steps again."""
        self._records.flush()

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
            OSError: It could not be written.
        """
        if self._writer is not None:
            with self._writing:
                self._writer.wait()

    def _state(self) -> dict[str, Any]:
        parts = {part.name: part.state_dict() for part in self.parts}
        return {name: state for name, state in parts.items() if state} | {
            "step": self.step,
            "train_seconds": self.train_seconds,
            "rays": self._step.rays,
            "untrained_error": self._untrained_error,
            "diverged": self.diverged,
            **self.model.state_dict(),
            "optimizer": self.optimizers.state_dict(),
            "average": self._average.state_dict(),
            "data": self._fingerprint.result(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "config": asdict(self.config),
        }

    def _is_finite(self) -> bool:
        """Returns whether all parameters are finite; synchronises with the device."""
        return all(bool(parameter.detach().sum().isfinite()) for parameter in self.field.parameters())

    def restore(self, checkpoint: dict[str, Any], *, path: Path | None = None, replaced: Sequence[Path] = ()) -> None:
        """Resumes from the content of a checkpoint; the grid adopts the saved resolution and box.

        Args:
            checkpoint: The content.
            path: The file from which it was read, to be returned by :attr:`checkpoint` until another one is written.
            replaced: Files to delete when the next checkpoint is written, unless ``trainer.keep_checkpoints`` is set.

        Raises:
            TypeError: The checkpoint is incomplete.
            ValueError: A tensor is not one that a session saves, or the checkpoint differs from this session in the box
                or the warp of the scene, in the resolution that ``trainer.stages`` has reached, in
                ``trainer.occupancy.resolution``, in whether cameras are refined, in whether exposures are learned, or
                in the number of training images with exposures.
        """
        missing = [name for name in _SAVED if name not in checkpoint]
        if missing:
            raise TypeError(f"checkpoint must be one that load_checkpoint returned, got one without {missing[0]!r}")
        saved = checkpoint["config"]
        scene = parse(SceneConfig, saved["scene"], "scene of the checkpoint")
        recorded = parse(WarpConfig, saved["warp"], "warp of the checkpoint")
        warp, present = None if scene.aabb is None else recorded.build(scene.aabb), self.model.warp
        if warp is not present and (warp is None or not warp.agrees_with(present)):
            raise ValueError(
                f"scene.aabb and the settings of warp must be those of the checkpoint ({warp}), got "
                f"{present}{_remedy(warp, present)}"
            )
        if warp is None and scene.aabb != self.config.scene.aabb:
            raise ValueError(
                f"scene.aabb must be that of the checkpoint, {_corners(scene.aabb)}, got "
                f"{_corners(self.config.scene.aabb)}"
            )
        saved_cells, cells = (list(x.shape) for x in (checkpoint["occupancy"]["occupied"], self.occupancy.occupied))
        if saved_cells != cells:
            raise ValueError(
                f"trainer.occupancy.resolution must be that of the checkpoint, {saved_cells[0]}, got {cells[0]}"
            )
        self._check_parts(checkpoint)
        self._check_settings(checkpoint)
        check_state("field", self.field, checkpoint["field"], self.model.grid.levels)
        check_state("occupancy", self.occupancy, checkpoint["occupancy"])
        changed = self._changed_data(checkpoint["data"]) if "data" in checkpoint else ""
        if changed:
            logger.warning("scene %s: training continues with the present data", changed)
        if self._writer is not None and path is not None:
            self._writer.follow(path, replaced)
        self.model.load_state_dict(checkpoint)
        self.model.adopt_resolution(reached_resolution(self.config.trainer.stages, checkpoint["step"]))
        self.optimizers.load_state_dict(checkpoint["optimizer"])
        for part in self.parts:
            if part.name in checkpoint:
                part.load_state_dict(checkpoint[part.name])
        self.step, self.train_seconds = checkpoint["step"], checkpoint["train_seconds"]
        self._step.resume(self.step, checkpoint["rays"])
        # Old checkpoints do not contain these two entries.
        self.diverged = checkpoint.get("diverged", False)
        self._untrained_error.copy_(checkpoint.get("untrained_error", torch.tensor(math.inf)))
        self._attach()
        if "average" in checkpoint:
            self._average.load_state_dict(checkpoint["average"], self.step)
        torch.set_rng_state(checkpoint["rng"].cpu())
        if self.device.type == "cuda" and checkpoint["cuda_rng"] is not None:
            torch.cuda.set_rng_state(checkpoint["cuda_rng"].cpu(), self.device)

    def _check_settings(self, checkpoint: dict[str, Any]) -> None:
        """Rejects stages that a resumed run would ignore, and warns of other settings that differ."""
        trainer = parse(TrainerConfig, checkpoint["config"]["trainer"], "trainer of the checkpoint")
        steps = checkpoint["step"]
        reached, present = (reached_resolution(config.stages, steps) for config in (trainer, self.config.trainer))
        if reached != present:
            raise ValueError(
                f"trainer.stages must have reached the resolution of the checkpoint at step {checkpoint['step']}, "
                f"{reached}, got {present}"
            )
        changed = changed_settings(checkpoint["config"], self.config)
        told = [
            f"{key} is {now} instead of {before}" for key, (before, now) in changed.items() if key.startswith(_RESUMED)
        ]
        if told:
            logger.warning("settings differ from those of the checkpoint: %s", clipped("; ".join(told), 500))

    def _changed_data(self, saved: dict[str, Tensor]) -> str:
        train = self.scene.train
        now = self._fingerprint.result() if self.output is not None else fingerprint(train)
        return changes(saved, now, train.names)

    def _check_parts(self, checkpoint: dict[str, Any]) -> None:
        """Rejects a checkpoint with the state of other parts than this session has."""
        own = {part.name: part for part in self.parts if part.state_dict()}
        saved = [name for name in checkpoint if name not in _SAVED + _ALSO_SAVED]
        for name in {**own, **dict.fromkeys(saved)}:
            if (name in saved) == (name in own):
                continue
            if name not in _SETTINGS_OF_PARTS:
                raise ValueError(
                    f"parts must be those of the checkpoint, {', '.join(saved) or 'none'}, got "
                    f"{', '.join(own) or 'none'}"
                )
            key, chosen = _SETTINGS_OF_PARTS[name]
            wanted, got = (chosen, "none") if name in saved else ("none", chosen)
            raise ValueError(f"{key} must be {wanted}, as in the checkpoint, got {got}")
        for name, part in own.items():
            part.check_state(checkpoint[name])

    def _enter_stage(self) -> None:
        """Changes the grid's box and resolution if a stage starts at this step."""
        stages, occupied = self.config.trainer.stages, self._occupied
        stage = stages[stage_at(stages, self.step)]
        if stage.step != self.step:
            return
        if self.step == 0:
            self._restrict()
        # Only a grid in the world frame is cropped: other frames have a fixed box.
        crop = stage.crop and self.model.warp is None
        if crop:
            occupied.fraction(self.step)  # raises if no occupied cell is left to crop to
        box = self.occupancy.bounds() if crop else None
        self.model.resize(stage.resolution, box, self._count_visible_samples, self.optimizers.grid)
        if crop:
            self._restrict()
        grid = self.model.grid
        logger.info("step %d: grid %d x %d x %d over %s", self.step, *grid.resolution, grid.aabb.tolist())
        vertices = sum(level[..., 0].numel() for level in grid.levels[: grid.active])
        self._records.scalars(self.step, {"stage/resolution": stage.resolution, "stage/vertices": vertices})
        self._attach()
        if self.step >= self.config.trainer.occupancy.start and not occupied.is_due(self.step):
            self._refresh_occupancy()
        self._find_lost_cameras()
        self._call(self._on_stage)

    def _find_lost_cameras(self) -> None:
        """Searches for cameras that were lost in earlier stages."""
        if self._lost_cameras is None or self.refinement is None or self.step == 0:
            return
        for camera in self._lost_cameras.find(self.refinement, self.model, self.exposure):
            if camera.twist is not None:
                self.refinement.set_pose(camera.index, camera.twist)
            logger.info("step %d: %s", self.step, camera)

    def _count_visible_samples(self, shape: Sequence[int]) -> Tensor:
        cameras, settings = self._pixels.cameras, self.settings
        settings = replace(settings, min_weight=max(settings.min_weight, _MIN_WEIGHT_WITH_DETAIL))
        every = max(1, min(cameras.width, cameras.height) // _PIXELS_LOOKED_AT)
        with self.model.autocast():
            return count_visible_samples(self.field, self.occupancy, settings, cameras, shape, every=every)

    def _restrict(self) -> None:
        """Excludes space known to be empty. With refined cameras, wrong poses would make images carve away matter."""
        if self.refinement is None:
            self._occupied.restrict_to_images(self._pixels)
        else:
            # Poses that need no coarse stages are right to within a few pixels, so space beside the cameras is known.
            self._occupied.restrict_to_box(None if self.config.camera.stages else self._pixels.cameras)

    def _refresh_occupancy(self) -> None:
        self._occupied.refresh(self.settings.step)
        self.optimizers.restrict(self.occupancy)

    def _attach(self) -> None:
        """Recreates everything that depends on the grids' shapes: working copies, active tiles, the CUDA graph."""
        self.optimizers.attach(copies_dtype(self.config.trainer.precision, self.device), self.occupancy)
        # The graph captures these as numbers, because computing them inside the capture would read from the device.
        settings = self.settings
        self._graphed = GraphedCall(lambda: self._step.run(settings), self.device, self.config.trainer.cuda_graph)
        self._average.restart()

    def _regularise_grid(self) -> None:
        """Accumulates the gradients of the loss terms on the grid itself, to which those of the step will be added."""
        variation = grid_weight(self.config.trainer.loss, "tv_features", self.step)
        if variation > 0:
            self.optimizers.add_total_variation(self.config.trainer.loss_scale * variation)
        terms = grid_terms(self.config.trainer.loss, self.model, self.step)
        if terms:
            (self.config.trainer.loss_scale * torch.stack(list(terms.values())).sum()).backward()
            self._step.count(terms)

    def _log_scalars(self, seconds: float, since_last: float) -> None:
        totals = self._step.totals.read()
        losses = mean_losses(totals)
        # Where the field is NaN, no sample is visible, so the loss of the remaining samples may be finite.
        if not self._is_finite() or not all(math.isfinite(value) for value in losses.values()):
            self._stop_not_finite(losses)
        self._note_divergence(losses["loss/photometric"])
        values = losses | rates_of_steps(totals, self.config.trainer, since_last)
        values["train/occupancy"] = self._occupied.fraction(self.step)
        values["train/seconds"] = seconds
        for part in self.parts:
            values |= part.scalars()
        values |= {f"lr/{name}": rate for name, rate in self.optimizers.rates().items()}
        if self.device.type == "cuda":
            values["gpu/allocated_GiB"] = torch.cuda.memory_allocated(self.device) / 2**30
            values["gpu/peak_GiB"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self._records.scalars(self.step, values)

    def _stop_not_finite(self, losses: dict[str, float]) -> NoReturn:
        """Saves the state for inspection and stops training."""
        hints = ""
        if self._writer is not None:
            try:
                hints = f"; the state is in {self._writer.save(self.step, self._state(), finite=False)}"
                self._writer.wait()
            except OSError as error:
                hints = f"; {error}"
            hints += "" if self.checkpoint is None else f", and the last valid checkpoint is {self.checkpoint}"
        raise FloatingPointError(
            f"step {self.step}: the loss or the field was not finite since the last record, now {losses}; lower "
            "optimizer.grid_lr or optimizer.network_lr, or trainer.loss_scale where gradients are float16, or set "
            f"trainer.not_finite=skip{hints}"
        )

    def _note_divergence(self, loss: float) -> None:
        """Compares the loss since the last record with that of the first step and sets :attr:`diverged`."""
        before, self.diverged = self.diverged, has_diverged(self.step, loss, float(self._untrained_error))
        if self.diverged and not before:
            logger.warning(
                "step %d: training diverges, with training pixels at %.1f dB after %.1f dB before the first step; "
                "lower trainer.rates.grid and trainer.rates.network",
                self.step,
                -10 * math.log10(loss),
                -10 * math.log10(max(float(self._untrained_error), 1e-10)),
            )

    def _call(self, hook: Hook | None) -> None:
        if hook is not None:
            hook(self)

    def _now(self) -> float:
        return synchronized_time(self.device)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _check_types(scene: object, model: object, trainer: object, optimizer: object, camera: object) -> None:
    """Raises TypeError unless the arguments of a session have the right types."""
    expected: tuple[tuple[str, object, tuple[type, ...], str], ...] = (
        ("scene", scene, (Scene,), "a voxelfield.Scene"),
        ("model", model, (ModelConfig, str), "a ModelConfig or the name of one"),
        ("trainer", trainer, (TrainerConfig, str, type(None)), "a TrainerConfig, the name of a preset or None"),
        ("optimizer", optimizer, (OptimizerConfig, str, type(None)), "an OptimizerConfig, the name of one or None"),
        ("camera", camera, (CameraConfig, type(None)), "a CameraConfig or None"),
    )
    for name, value, types, words in expected:
        if not isinstance(value, types):
            raise TypeError(f"{name} must be {words}, got {shown(value)}")


def _remedy(saved: Warp | None, present: Warp | None) -> str:
    """Returns the setting that chooses the kind of warp of a checkpoint, if only that differs."""
    if saved is None or present is None or saved.is_forward_facing == present.is_forward_facing:
        return ""
    return f": set warp.ndc={str(saved.is_forward_facing).lower()}"


def _corners(aabb: tuple[tuple[float, ...], ...] | None) -> list[list[float]] | None:
    return None if aabb is None else [list(corner) for corner in aabb]


def _model_config(model: ModelConfig | str) -> ModelConfig:
    """Returns a model config; for a name, that kind of model with its default settings."""
    if isinstance(model, ModelConfig):
        return model
    if model not in model_names():
        raise ValueError(f"model must be one of {', '.join(model_names())}, got {model!r}")
    return parse(ModelConfig, {"kind": model}, "model")
