"""The training session: the training loop behind both the Python API and the command line."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from voxelfield import _library, processes
from voxelfield.components.averaging import WeightAverage
from voxelfield.components.exposure import AffineExposure, ColorCorrection, Correction
from voxelfield.components.refinement import CameraRefinement, RefinedCameras
from voxelfield.components.tones import CameraTones
from voxelfield.config import parse
from voxelfield.datasets.scene import Scene
from voxelfield.devices import choose_device
from voxelfield.evaluation.evaluation import Evaluation
from voxelfield.fields.field import RadianceField
from voxelfield.foundation.errors import shown
from voxelfield.interrupt import Interrupt
from voxelfield.models.batch import Batch
from voxelfield.models.component import Component, Loss, LossTerms
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.pixel_sampler import Images, PixelSampler
from voxelfield.models.settings import reached_resolution
from voxelfield.models.training import MemoryEstimate, TrainingSetup
from voxelfield.rendering.march import Sampler, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.run_directory import RunDirectoryLock
from voxelfield.settings import CameraConfig, OptimizerConfig, RunConfig, TrainerConfig
from voxelfield.settings.resolve import resolve_arguments
from voxelfield.trained.build import untrained_model
from voxelfield.trained.checkpoint_file import CheckpointWriter
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.trained.zero_packing import pack_streams
from voxelfield.training.build import configured_components
from voxelfield.training.execution import GraphedCall, synchronized_time
from voxelfield.training.fingerprint import changes, fingerprint
from voxelfield.training.logs import FailsafeLogger, NullLogger, Progress, RunLogger
from voxelfield.training.memory import check_memory, estimate_memory, explain_shortage, place_of_images
from voxelfield.training.optimizer import Optimizers, copies_dtype
from voxelfield.training.recording import Recorder, log_preview
from voxelfield.training.reduction import divided_density
from voxelfield.training.resume import check_complete, check_names, check_resumable
from voxelfield.training.step import TrainingStep
from voxelfield.warps.choice import WarpConfig
from voxelfield.warps.warp import Warp

_log = logging.getLogger(__name__)

_STEPS_BETWEEN_AGREEMENTS = 32

C = TypeVar("C", bound=Correction)
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
        config: All settings, after validation.
        device: Device on which training runs.
        model: The model.
        components: Camera refinement, exposure corrections and others as configured, then the given components.
        optimizers: The optimizers of the field.
        output: The output folder, as given.
        step: Number of steps done.
        train_seconds: Wall-clock seconds spent on building the field and on these steps, without previews and
            checkpoints.

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
        losses = losses or {}
        _check_types(losses, components, sampler, output)
        config = resolve_arguments(scene, model, trainer, optimizer, camera, warp, device, seed)
        self.scene = scene
        self.config = RunConfig(**vars(config))
        self.device = choose_device(config.device)
        self.log = NullLogger() if logger is None or not processes.is_first() else logger
        # A lock that is handed on ends with the caller; one of its own lasts as long as the session writes.
        self._lock = output if isinstance(output, RunDirectoryLock) else None
        self._unlocks_after_waiting = False
        folder = output.directory if isinstance(output, RunDirectoryLock) else output
        self.output = None if folder is None else Path(folder)
        if len(set(processes.gather_objects(output is None))) > 1:
            raise ValueError("output must be given in all processes of a group or in none, got one in some of them")
        self._on_step, self._on_stage, self._on_preview = on_step, on_stage, on_preview
        divided = scene.train.local_slice is not None
        self._writer: CheckpointWriter | None = None
        if self.output is not None and processes.is_first():
            self._writer = CheckpointWriter(self.output, config.trainer.keep_checkpoints, self._before_writing)
        self._fingerprint: Future[dict[str, Tensor]] | None = None
        if self._writer is not None or (self.output is not None and divided):
            # Checkpoints need the fingerprint; it is computed in the background, so that they need not wait.
            with_images = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fingerprint")
            self._fingerprint = with_images.submit(fingerprint, scene.train)
            with_images.shutdown(wait=False)
        _library.ensure_loaded(self.device.type)
        self._images: Images = place_of_images(self.estimate_memory, config.trainer.images, self.device, divided)
        if self.device.type == "cuda":
            check_memory(self.estimate_memory(), self.device)
        with explain_shortage(self.estimate_memory, self.device):
            self._build(components, losses, sampler)

    def _build(self, components: Sequence[Component], losses: Mapping[str, Loss], sampler: Sampler) -> None:
        config, trainer = self.config, self.config.trainer
        torch.manual_seed(config.seed)
        started = self._now()
        self.model = untrained_model(config, self.device)
        pixels = PixelSampler(
            self.scene.train,
            self.device,
            trainer.supersampling,
            trainer.patches,
            trainer.patch_size,
            images=self._images,
        )
        self.components = [*configured_components(config, self.scene, self.model, pixels), *components]
        check_names(self.model, self.components)
        self._joining = [self.model, *self.components]
        groups = {name: group for component in self._joining for name, group in component.param_groups().items()}
        copies, varies = copies_dtype(trainer.precision, self.device), trainer.loss.tv_features > 0
        self.optimizers = Optimizers(
            self.model, config.optimizer, trainer.rates, groups, copies, varies, trainer.visible_samples
        )
        self._step = TrainingStep(
            self.model,
            pixels,
            self.optimizers,
            trainer,
            components=[*self._joining, LossTerms(losses)],
            sampler=sampler,
            shared=True,
        )
        refines, coarse = config.camera.refines, bool(config.camera.stages)
        setup = TrainingSetup(
            trainer.stages,
            trainer.occupancy,
            trainer.loss,
            trainer.loss_scale,
            self.optimizers,
            pixels.cameras,
            # Wrong poses would make images carve away matter. Those that need no coarse stages are wrong by a few
            # pixels only, so that the space beside the cameras is known.
            visual_hull=None if refines else pixels.visual_hull,
            reliable_poses=not (refines and coarse),
            divide=divided_density,
            hidden_step=None if refines else trainer.occupancy.hidden_step(trainer.steps, trainer.stages),
        )
        self.model.begin_training(setup)
        self._average = WeightAverage(self.model, self.optimizers, trainer.steps, trainer.average_steps)
        self.step = 0
        self._recorder = Recorder(self.model, self.components, self._step, self.optimizers, trainer)
        self.optimizers.attach()
        self._renew()
        self.train_seconds = self._recorded_seconds = self._now() - started

    def _renew(self) -> None:
        """Recreates everything that depends on the grids' shapes, apart from the optimizers' part of it."""
        # The graph captures these as numbers, because computing them inside the capture would read from the device.
        settings = self.model.settings
        self._graphed = GraphedCall(lambda: self._step.run(settings), self.device, self.config.trainer.cuda_graph)
        self._average.restart()
        self._layout = self.optimizers.layout

    @property
    def field(self) -> RadianceField:
        """The field of the model."""
        return self.model.field

    @property
    def occupancy(self) -> OccupancyGrid:
        """The occupied cells of the model."""
        return self.model.occupancy

    @property
    def diverged(self) -> bool:
        """Whether, at the last record, training pixels were rendered clearly worse than by the untrained field."""
        return self._recorder.diverged

    @property
    def refinement(self) -> CameraRefinement | None:
        """The refinement of the training cameras; None if they are not refined."""
        return next((component for component in self.components if isinstance(component, CameraRefinement)), None)

    @property
    def exposure(self) -> AffineExposure | None:
        """Learned exposure corrections of the training images; None with ``trainer.exposure=none``."""
        return self._correction(AffineExposure)

    @property
    def tones(self) -> CameraTones | None:
        """Learned vignetting and response of the training cameras; None if neither is learned."""
        return self._correction(CameraTones)

    def _correction(self, kind: type[C]) -> C | None:
        corrections = (component.correction for component in self.components if isinstance(component, ColorCorrection))
        return next((correction for correction in corrections if isinstance(correction, kind)), None)

    def estimate_memory(self, images: Images | None = None) -> MemoryEstimate:
        """Estimates the memory that training needs at its final resolution.

        Args:
            images: Where the training images are (:data:`voxelfield.models.pixel_sampler.Images`); None for the place
                that was chosen.
        """
        return estimate_memory(
            untrained_model(self.config, "meta"),
            self.config.trainer,
            self.scene.train,
            self.device.type,
            images=self._images if images is None else images,
            moments=self.config.optimizer.moments,
        )

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
        if self._recorder.is_due(self.step):
            self._record(self.train_seconds)
        if self.step >= config.steps:
            self._average.apply()
        return batch

    def _advance(self) -> Batch:
        """Takes one step."""
        if self.optimizers.division is not None and self.optimizers.division.materialized:
            self.optimizers.division.release()
        if any(stage.step == self.step for stage in self.config.trainer.stages):
            self._graphed.discard()  # its memory is needed for the change of the grids
        attached = self.optimizers.attached
        for component in self._joining:
            component.before_step(self.step)
        if self.optimizers.attached != attached:
            self._begin_stage()
        elif self.optimizers.layout != self._layout:
            self._graphed.discard()
            self._layout = self.optimizers.layout
        if self.optimizers.division is not None:
            self.optimizers.division.start_moments()
        self._graphed()
        if self.step == 0:
            self._recorder.note_untrained_error()
        self.step += 1
        self._average.update(self.step)
        self._call(self._on_step)
        return self._step.batch

    def _begin_stage(self) -> None:
        """Logs the grid's new box and resolution, and calls the hook."""
        grid = self.model.grid
        _log.info("step %d: grid %d x %d x %d over %s", self.step, *grid.resolution, grid.aabb.tolist())
        vertices = sum(level[..., 0].numel() for level in grid.levels[: grid.active])
        values = {"stage/resolution": self.model.resolution, "stage/vertices": vertices}
        self._records.scalars(self.step, values)
        self._renew()
        self._call(self._on_stage)

    def _train(self, wait: bool) -> Iterator[Batch]:
        """Takes the remaining steps with records, previews and checkpoints; yields the batch of each step."""
        config = self.config.trainer
        self._started, self._recorded_seconds = self._now() - self.train_seconds, self.train_seconds
        with (
            self._locked_output(wait),
            explain_shortage(self.estimate_memory, self.device),
            Interrupt() as interrupt,
            Progress(config.steps, self.step, silent=not processes.is_first()) as progress,
        ):
            with contextlib.suppress(GeneratorExit):
                while self.step < config.steps and not self._stops(interrupt):
                    # On CUDA the number of rays that fit is known only to the device.
                    rays = self._step.rays if self._step.capacity is None else 0
                    batch = self._advance()
                    progress.update(self.step, psnr=self._step.psnr, rays=rays)
                    if self._recorder.is_due(self.step):
                        self._record(self._now() - self._started)
                    if _due(self.step, config.preview_every):
                        with self._pause(progress):
                            self.preview()
                            self._call(self._on_preview)
                    if _due(self.step, config.checkpoint_every) and self.step < config.steps:
                        with self._pause(progress):
                            self._save(optional=config.checkpoint_errors == "continue")
                    yield batch
            if self.step >= config.steps:
                self._average.apply()
            self.train_seconds = self._now() - self._started
            # No CUDA graph is captured from here on, so another thread may use the device.
            self._materialize()
            self._save(settled=True)
            if wait:
                self.wait()

    @contextlib.contextmanager
    def _pause(self, progress: Progress) -> Iterator[None]:
        """Stops the clock during a block, such as a preview, which does not count as training time."""
        began = self._now()
        self.train_seconds = began - self._started
        with progress.paused():
            yield
        self._started += self._now() - began

    def _stops(self, interrupt: Interrupt) -> bool:
        """Returns whether any process has been asked to stop; all of them stop after the same step."""
        # Hosts of GPUs are many steps ahead of them, and need not wait for each other in every step.
        every = _STEPS_BETWEEN_AGREEMENTS if self.device.type == "cuda" else 1
        if processes.count() > 1 and self.step % every > 0:
            return False
        return processes.any_of(interrupt.requested)

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

    def renderer(self) -> FieldRenderer:
        """Returns a renderer of the field's current state; after further steps, request a new one."""
        return self.model.renderer()

    def result(self) -> TrainedModel:
        """Returns the current state as a :class:`TrainedModel` for rendering and saving.

        Further steps change its field. A collective call.
        """
        self._materialize()
        tones = None if self.tones is None else copy.deepcopy(self.tones.state_dict())
        # Without the training images and the optimizer.
        return TrainedModel(self.model.around(), copy.deepcopy(self.config), self.step, self.cameras, tones)

    def _materialize(self) -> None:
        """Makes grids whole that are divided over processes; a collective call."""
        division = self.optimizers.division
        if division is not None and not division.materialized:
            division.materialize()
            # A process group cannot end while a captured graph refers to it.
            self._graphed.discard()

    @property
    def cameras(self) -> RefinedCameras | None:
        """The given and the refined training cameras, on the CPU; None if they are not refined."""
        if self.refinement is None:
            return None
        return RefinedCameras(self.refinement.given.to("cpu"), self.refinement.refined().to("cpu"))

    def preview(self) -> None:
        """Logs render | truth | error | depth for fixed test views, and their PSNR; no-op without a test split."""
        split = self.scene.splits.get("test")
        if split is not None and processes.is_first():
            views, cameras = self.config.trainer.preview_views, self.cameras
            split = split if cameras is None else cameras.follow_split(split)
            log_preview(self.model.renderer(few=True), split, self.model.background, self._records, self.step, views)

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
        with self._locked_output(wait):
            path = self._save()
            if wait:
                self.wait()
        return path

    @contextlib.contextmanager
    def _locked_output(self, wait: bool) -> Iterator[None]:
        """Locks the output folder for a block and, unless the block waits for its files, until :meth:`wait`."""
        if self._writer is None or (self._lock is not None and not self._unlocks_after_waiting):
            yield
            return
        lock = self._lock or RunDirectoryLock(self._writer.directory, "output")
        self._lock, self._unlocks_after_waiting = lock, False
        try:
            yield
            self._unlocks_after_waiting = not wait
        finally:
            if not self._unlocks_after_waiting:
                self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock, self._unlocks_after_waiting = None, False

    def _before_writing(self) -> None:
        """Called by the thread that writes checkpoints, before each of them."""
        if self._lock is not None:
            self._lock.renew()
        # A run that is resumed does not log earlier steps again.
        self._records.flush()

    def _save(self, *, finite: bool | None = None, settled: bool = False, optional: bool = False) -> Path | None:
        """Like :meth:`save`, but does not wait; a collective call.

        The arguments are as for :meth:`CheckpointWriter.save`; ``finite=None`` looks at the field.
        """
        if self.output is None:
            return None
        finite = self._recorder.is_finite() if finite is None else finite
        average = self._average.state_dict()
        components = {component.name: component.state_dict() for component in self.components}
        data = {} if self._fingerprint is None else self._whole_fingerprint()
        division = self.optimizers.division
        with contextlib.ExitStack() as stack:
            masters = {} if division is None else stack.enter_context(division.packed(pack_streams))
            if self._writer is None:
                return None
            state: dict[str, Any] = {name: own for name, own in components.items() if own}
            state |= {
                "step": self.step,
                "train_seconds": self.train_seconds,
                "rays": self._step.rays,
                **self._recorder.state_dict(),
                **self.model.state_dict(),
                "optimizer": self.optimizers.state_dict(),
                "rng": torch.get_rng_state(),
                "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
                "config": asdict(self.config),
                "average": average,
                "data": data,
            }
            for name, parameter in self.model.field.named_parameters():
                if parameter in masters:
                    state["field"][name] = masters[parameter]
            return self._writer.save(self.step, state, finite=finite, settled=settled, optional=optional)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
            OSError: It could not be written.
        """
        if self._writer is not None:
            try:
                self._writer.wait()
            finally:
                if self._unlocks_after_waiting:
                    self._unlock()

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
                ``trainer.occupancy.resolution``, in whether cameras are refined, in ``optimizer.matrices``,
                ``trainer.exposure``, ``trainer.vignetting`` or ``trainer.response``, in the number of training images
                with exposures, or in the cameras with vignetting or a response.
        """
        check_complete(checkpoint)
        # The model of a script is not found by its name, and a saved setting of the model has no effect here.
        config = {**checkpoint["config"], "model": self.config.model}
        saved = parse(RunConfig, config, "config of the checkpoint")
        check_resumable(checkpoint, saved, self.config, self.model, self.components)
        if processes.is_first() or self.scene.train.local_slice is not None:
            self._compare_data(checkpoint["data"])
        self.optimizers.gather()
        if self._writer is not None and path is not None:
            self._writer.follow(path, replaced)
        self.model.load_state_dict(checkpoint)
        self.model.resolution = reached_resolution(self.config.trainer.stages, checkpoint["step"])
        self.optimizers.load_state_dict(checkpoint["optimizer"])
        for component in self.components:
            if component.name in checkpoint:
                component.load_state_dict(checkpoint[component.name])
        self.step = checkpoint["step"]
        self.train_seconds = self._recorded_seconds = checkpoint["train_seconds"]
        self._step.resume(self.step, checkpoint["rays"])
        self._recorder.load_state_dict(checkpoint)
        self.optimizers.attach()
        self._renew()
        self._average.load_state_dict(checkpoint["average"], self.step)
        torch.set_rng_state(checkpoint["rng"].cpu())
        if self.device.type == "cuda" and checkpoint["cuda_rng"] is not None:
            torch.cuda.set_rng_state(checkpoint["cuda_rng"].cpu(), self.device)

    def _compare_data(self, saved: dict[str, Tensor]) -> None:
        """Logs a warning if the training images differ from those of the checkpoint."""
        changed = changes(saved, self._whole_fingerprint(), self.scene.train.names)
        if changed:
            _log.warning("scene %s: training continues with the present data", changed)

    def _whole_fingerprint(self) -> dict[str, Tensor]:
        """Returns the fingerprint of all training data; a collective call if processes divide the images."""
        train = self.scene.train
        own = fingerprint(train) if self._fingerprint is None else self._fingerprint.result()
        return own | {"images": torch.tensor(train.all_gather(own["images"].tolist()))}

    def _record(self, seconds: float) -> None:
        """Records the metrics of the last steps; if they are not finite, saves the state for inspection and stops.

        Args:
            seconds: Training time.
        """
        since_last, self._recorded_seconds = seconds - self._recorded_seconds, seconds
        try:
            self._records.scalars(self.step, self._recorder.collect_metrics(self.step, seconds, since_last))
        except FloatingPointError as error:
            hints = ""
            try:
                path = self._save(finite=False)
                if self._writer is not None:
                    self._writer.wait()
                    hints = f"; the state is in {path}"
            except OSError as failure:
                hints = f"; {failure}"
            if self.checkpoint is not None:
                hints += f", and the last valid checkpoint is {self.checkpoint}"
            raise FloatingPointError(f"{error}{hints}") from None

    def _call(self, hook: Hook | None) -> None:
        if hook is not None:
            hook(self)

    def _now(self) -> float:
        return synchronized_time(self.device)


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
        raise TypeError(f"output must be a path or None, got {shown(output)}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
