"""The training session: the training loop behind both the Python API and the command line."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from voxelfield import _library, processes
from voxelfield.components.exposure import AffineExposure, CameraTones
from voxelfield.components.logger import FailsafeLogger, NullLogger, RunLogger
from voxelfield.components.refinement import CameraRefinement, RefinedCameras
from voxelfield.datasets.scene import Scene
from voxelfield.devices import choose_device
from voxelfield.evaluation.evaluation import Evaluation, evenly_spaced
from voxelfield.evaluation.metrics import psnr
from voxelfield.foundation.errors import shown
from voxelfield.interrupt import Interrupt
from voxelfield.models.batch import Batch
from voxelfield.models.component import Component, Kind, Loss, find_component, named_losses
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.pixel_sampler import Images
from voxelfield.models.training import MemoryEstimate
from voxelfield.progress import NotebookPicture, Progress, in_notebook
from voxelfield.rendering.march import Sampler, visible_samples
from voxelfield.rendering.pixels import composite_background
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.rendering.view_pictures import comparison_panel
from voxelfield.run_directory import RunDirectoryLock
from voxelfield.settings import CameraConfig, OptimizerConfig, RunConfig, TrainerConfig
from voxelfield.settings.resolve import resolve_arguments
from voxelfield.trained.trained_model import TrainedModel, outlined_model
from voxelfield.training.checkpoints import Checkpoints, agreement
from voxelfield.training.memory import check_memory, estimate_memory, explain_shortage, place_of_images
from voxelfield.training.state import TrainingState
from voxelfield.warps.choice import WarpConfig
from voxelfield.warps.warp import Warp

_logger = logging.getLogger(__name__)

Hook = Callable[["Session"], None]
"""A function that a session calls with itself as the argument."""


class Session:
    """Trains a model on the images of a scene.

    Settings that are not given default to those of ``python train.py model=NAME`` on the same device; for an
    unbounded scene, to those for photographs. Hooks are called between two steps, on the training thread; they may
    read any state, log, save, or raise to stop training.

    In a process group of torch.distributed, all processes train the model together, and grids are divided over them
    (docs/several_gpus.md). They must construct the session alike and call its methods in the same order; the features
    of grids are then readable after :meth:`result`, until the next step.

    :func:`voxelfield.write_results` writes the report of a session and the other results of a run.

    Args:
        scene: Images and cameras, with a split named ``train``.
        model: The model's settings, or its name (``pyramid``, ``sh``, ``dense``, or one that a package announces). The
            settings build the :class:`voxelfield.Model`, which may be a subclass of your own. Or the settings of a
            whole run, as :func:`voxelfield.settings.preset` returns them; those of scene and data are only
            recorded in the results, because ``scene`` is given.
        trainer: Settings of the training loop, or the name of a file in ``configs/trainer``.
        optimizer: Settings of the optimizers, or the name of a file in ``configs/optimizer``.
        camera: Settings of camera refinement, such as ``CameraConfig(name="refine")``; None uses the given cameras.
        warp: The warp of the field, or settings of its choice; None chooses it from the scene
            (:meth:`voxelfield.models.model_config.ModelConfig.choose_warp`).
        losses: Loss terms that are added to the model's, by name; each maps outputs and batch to a scalar that is
            already multiplied by its weight (:data:`voxelfield.models.component.Loss`). A term of the name of another
            one, such as ``photometric``, replaces it.
        components: Your components that join each step (:class:`voxelfield.models.component.Component`), in this order.
        sampler: Places samples on the rays of training (:data:`voxelfield.rendering.march.Sampler`).
        device: Device on which to train: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``; None means ``auto``.
        seed: Seed of torch's random number generators, set before the field is built; None means 0.
        output: Folder for checkpoints, or the lock of one that the caller has taken; None writes no files.
        logger: Receives scalars and images; None discards them.
        on_step: Called after every step; its time counts as training time. On CUDA, steps are asynchronous, so reading
            a tensor synchronises.
        on_stage: Called when the grid has changed its box or resolution, and at the first step.
        on_preview: Called every ``trainer.preview_every`` steps, after :meth:`preview`; not counted as training time.

    Attributes:
        scene: The scene, as given.
        config: All settings, as settled for the scene: its box, warp and background, and as many rays as it needs.
        device: Device on which training runs.
        model: The model.
        field: The field of the model.
        occupancy: The occupied cells of the model.
        components: Camera refinement, exposure corrections and others as configured, then the given components.
        optimizers: The optimizers of the field.
        output: The output folder, as given.
        log: The logger for scalars and images.
        records: Writes to ``log``. If that fails, nothing more is recorded there, and training continues.

    Raises:
        TypeError: An argument has the wrong type, or is given although the settings of a whole run contain it.
        ValueError: A setting or the name of a component is not allowed, no training camera sees any part of the scene's
            box, or training needs more memory than is free on the GPU; the message names the key.
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
        model: ModelConfig | RunConfig | str = "pyramid",
        *,
        trainer: TrainerConfig | str | None = None,
        optimizer: OptimizerConfig | str | None = None,
        camera: CameraConfig | None = None,
        warp: WarpConfig | Warp | None = None,
        losses: Mapping[str, Loss] | None = None,
        components: Sequence[Component] = (),
        sampler: Sampler = visible_samples,
        device: torch.device | str | None = None,
        seed: int | None = None,
        output: Path | str | RunDirectoryLock | None = None,
        logger: RunLogger | None = None,
        on_step: Hook | None = None,
        on_stage: Hook | None = None,
        on_preview: Hook | None = None,
    ) -> None:
        _check_types(losses or {}, components, sampler, output)
        config = resolve_arguments(scene, model, trainer, optimizer, camera, warp, device, seed)
        losses = {**named_losses(config.losses), **(losses or {})}
        self.scene = scene
        self.config = RunConfig(**vars(config))
        self.device = choose_device(config.device)
        if processes.count() > 1:
            processes.check_alike(dict(enumerate(processes.gather_objects(agreement(config, scene)))))
        self.log: RunLogger = NullLogger() if logger is None or not processes.is_first() else logger
        self.records = FailsafeLogger(lambda: self.log)
        hooks = (hook or (lambda session: None) for hook in (on_step, on_stage, on_preview))
        self._on_step, self._on_stage, self._on_preview = hooks
        # Flushed before each checkpoint, because a run that is resumed does not log earlier steps again.
        keep, flush = config.trainer.keep_checkpoints, self.records.flush
        self._checkpoints = Checkpoints(output, scene.train, keep, before=flush)
        self.output = self._checkpoints.directory
        _library.ensure_loaded(self.device.type)
        divided = scene.train.local_slice is not None
        self._images: Images = place_of_images(self.estimate_memory, config.trainer.images, self.device, divided)
        if self.device.type == "cuda":
            check_memory(self.estimate_memory(), self.device)
        with explain_shortage(self.estimate_memory, self.device):
            self._state = state = TrainingState(config, scene, self.device, self._images, components, losses, sampler)
        self.model, self.components, self.optimizers = state.model, state.components, state.optimizers
        self.field, self.occupancy = state.model.field, state.model.occupancy
        times, inputs = scene.train.extras.get("time"), (*self.field.extra_inputs, *self.field.density_inputs)
        if times is not None and "time" not in inputs and bool((times != times[:1]).any()) and processes.is_first():
            _logger.warning(
                "the photographs have different times, on which this field does not depend: it is static, and what "
                "moves becomes blurred; choose the photographs of one moment, or a field that depends on 'time'"
            )

    @property
    def diverged(self) -> bool:
        """Whether, at the last record, training pixels were rendered clearly worse than by the untrained field."""
        return self._state.diverged

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._state.steps

    @property
    def train_seconds(self) -> float:
        """Wall-clock seconds spent on building the field and on these steps, without previews and checkpoints."""
        return self._state.clock.seconds

    def component(self, kind: type[Kind]) -> Kind | None:
        """Returns the component of a class, or None.

        Args:
            kind: Such as :class:`voxelfield.components.refinement.CameraRefinement`, or
                :class:`voxelfield.components.exposure.AffineExposure`.
        """
        return find_component(self.components, kind)

    def estimate_memory(self, images: Images | None = None) -> MemoryEstimate:
        """Estimates the memory that training needs at its final resolution.

        Args:
            images: Where the training images are (:data:`voxelfield.models.pixel_sampler.Images`); None for the place
                that was chosen.
        """
        model = outlined_model(self.config, "cpu")
        place = self._images if images is None else images
        return estimate_memory(model, self.config, self.scene.train, self.device.type, place)

    def fit(self, *, wait: bool = True) -> bool:
        """Trains up to the configured number of steps. Ctrl-C, SIGTERM or SIGHUP stops training after the current step.

        In a notebook, a picture of the field stands below the cell, and sharpens.

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
        config, state = self.config.trainer, self._state
        if self.step >= config.steps:
            raise ValueError(f"session.step must be below trainer.steps, {config.steps}, got {self.step}")
        state.clock.start(wait=False)
        batch = self._advance()
        self._record_if_due()
        state.clock.read(wait=False)
        if self.step >= config.steps:
            state.finish()
        return batch

    def _train(self, wait: bool) -> Iterator[Batch]:
        """Takes the remaining steps with records, previews and checkpoints; yields the batch of each step."""
        config, state = self.config.trainer, self._state
        picture = NotebookPicture() if in_notebook() and processes.count() == 1 else None
        state.clock.start()
        with (
            Interrupt() as interrupt,
            explain_shortage(self.estimate_memory, self.device),
            self._checkpoints.locked_output(wait),
            contextlib.closing(Progress("step", config.steps, self.step)) as progress,
        ):
            with contextlib.suppress(GeneratorExit):
                while self.step < config.steps and not interrupt.requested_by_any(self.step, self.device):
                    # With a limited capacity, only the device knows how many rays fit.
                    rays = state.training_step.rays if state.training_step.capacity is None else 0
                    batch = self._advance()
                    progress.update(self.step, note=lambda: f"PSNR {state.training_step.psnr():.2f} dB", rays=rays)
                    self._record_if_due()
                    if _due(self.step, config.preview_every, config.steps):
                        with state.clock.paused(), progress.paused():
                            self.preview()
                            self._on_preview(self)
                    if self.step < config.steps and _due(self.step, config.checkpoint_every, config.steps):
                        with state.clock.paused(), progress.paused():
                            self._checkpoints.save(state, optional=config.checkpoint_errors == "continue")
                    if picture is not None and picture.due:
                        with state.clock.paused(), progress.paused():
                            picture.show(lambda: self.result().overview(240))
                    yield batch
            if self.step >= config.steps:
                state.finish()
            state.clock.read()
            if picture is not None:
                picture.show(lambda: self.result().overview(240))
            # No CUDA graph is captured from here on, so another thread may use the device.
            state.materialize()
            self._checkpoints.save(state, settled=True)

    def _advance(self) -> Batch:
        if self._state.prepare_step():
            grid = self.model.grid
            box = " to ".join("({:.3g}, {:.3g}, {:.3g})".format(*corner) for corner in grid.aabb.tolist())
            _logger.info("step %d: grid %d x %d x %d over %s", self.step, *grid.resolution, box)
            vertices = sum(level[..., 0].numel() for level in grid.levels[: grid.active])
            values = {"stage/resolution": self.model.resolution, "stage/vertices": vertices}
            self.records.scalars(self.step, values)
            self._on_stage(self)
        batch = self._state.take_step()
        self._on_step(self)
        return batch

    @property
    def checkpoint(self) -> Path | None:
        """The last valid checkpoint on disk, or the one from which training was resumed; None if there is neither."""
        return self._checkpoints.newest

    def renderer(self) -> FieldRenderer:
        """Returns a renderer of the field's current state; after further steps, request a new one."""
        return self.model.renderer()

    def result(self) -> TrainedModel:
        """Returns the current state as a :class:`TrainedModel` for rendering and saving.

        Further steps change its field. A collective call.
        """
        self._state.materialize()
        learned, exposure = self.component(CameraTones), self.component(AffineExposure)
        tones = None if learned is None else copy.deepcopy(learned.state_dict())
        exposures = None if exposure is None or not exposure.applied else copy.deepcopy(exposure.state_dict())
        # Without the training images and the optimizer.
        model, config = copy.copy(self.model), copy.deepcopy(self.config)
        return TrainedModel(model, config, self.step, self.cameras, tones, exposures)

    @property
    def cameras(self) -> RefinedCameras | None:
        """The given and the refined training cameras, on the CPU; None if they are not refined."""
        refinement = self.component(CameraRefinement)
        if refinement is None:
            return None
        return RefinedCameras(refinement.given.to("cpu"), refinement.refined().to("cpu"))

    def preview(self) -> None:
        """Logs render, truth, error and depth of fixed test views, and their PSNR; no-op without a test split."""
        split = self.scene.splits.get("test")
        if split is None or not processes.is_first():
            return
        split = split if self.cameras is None else self.cameras.follow_split(split)
        renderer, background = self.model.renderer(few=True), self.model.background
        scores: list[float] = []
        for index in evenly_spaced(self.config.trainer.preview_views, len(split)):
            view = renderer.view(split.cameras, index)
            truth = composite_background(split.image(index).to(view.rgb.device), background)
            scores.append(float(psnr(view.rgb.clamp(0, 1), truth, split.mask(index, truth.device))))
            self.records.images(self.step, f"test/{split.names[index]}", comparison_panel(view, truth))
        mean = math.fsum(scores) / len(scores)
        self.records.scalars(self.step, {"test/psnr": mean})
        _logger.info("step %d: PSNR %.2f dB over %d test views", self.step, mean, len(scores))

    def evaluate(
        self, split: str = "test", *, views: int | None = None, images: Path | str | None = None, progress: bool = True
    ) -> Evaluation:
        """Evaluates the current state against views of the scene.

        Args:
            split: Name of the split.
            views: Number of views to evaluate, spread evenly; None for all.
            images: Folder to which the rendered views are written as PNG; None writes none.
            progress: Display how many views are done.

        Raises:
            ValueError: The scene has no such split, or ``views`` is below 1.
            FileExistsError: ``images`` contains an image of a view's name that voxelfield has not written.
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
        with self._checkpoints.locked_output(wait):
            return self._checkpoints.save(self._state)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
            OSError: It could not be written.
        """
        self._checkpoints.wait()

    def restore(self, checkpoint: dict[str, Any], *, path: Path | None = None, replaced: Sequence[Path] = ()) -> None:
        """Resumes from the content of a checkpoint; the grid adopts the saved resolution and box.

        Args:
            checkpoint: The content.
            path: The file from which it was read, to be returned by :attr:`checkpoint` until another one is written.
            replaced: Files to delete when the next checkpoint is written, unless ``trainer.keep_checkpoints`` is set.

        Raises:
            TypeError: The checkpoint is incomplete.
            ValueError: A tensor is not one that a session saves, or the checkpoint differs from this session in the box
                or the warp of the scene, in the resolution that ``trainer.stages`` has reached, or in a setting on
                which the saved state depends; the message names it.
        """
        self._checkpoints.restore(self._state, checkpoint, path, replaced)

    def _record_if_due(self) -> None:
        """Records the metrics of the steps since the last record."""
        config = self.config.trainer
        if self.step % config.log_every == 0 or self.step == config.steps:
            self._state.clock.read()
            with self._checkpoints.saved_unless_finite(self._state):
                self.records.scalars(self.step, self._state.collect_metrics())


def _check_types(losses: Mapping[str, Loss], components: Sequence[Component], sampler: Sampler, output: object) -> None:
    """Raises TypeError unless arguments of a session that are not settings have the right types."""
    for index, component in enumerate(components):
        if not isinstance(component, Component):
            raise TypeError(f"components[{index}] must be a voxelfield.models.Component, got {shown(component)}")
    for name, loss in losses.items():
        if not callable(loss):
            raise TypeError(f"losses[{name!r}] must be a function of outputs and batch, got {shown(loss)}")
    if not callable(sampler):
        raise TypeError(f"sampler must be a function like visible_samples, got {shown(sampler)}")
    if not isinstance(output, (str, os.PathLike, RunDirectoryLock, type(None))):
        raise TypeError(f"output must be a path, the lock of one or None, got {shown(output)}")


def _due(step: int, every: int, last: int) -> bool:
    return every > 0 and (step % every == 0 or step == last)
