"""A complete run from a configuration: load, train, evaluate, write results."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from voxelfield import _library, processes
from voxelfield.components.logger import LoggerSettings, RunLogger, SeveralLoggers
from voxelfield.components.registry import active
from voxelfield.datasets.loading import find_scene, load_scene
from voxelfield.datasets.registry import FoundScene
from voxelfield.datasets.scene import Scene, Split
from voxelfield.devices import choose_device, keep_freed_memory
from voxelfield.evaluation.evaluation import check_pictures, evaluate_split
from voxelfield.evaluation.metrics import WINDOW, check_lpips
from voxelfield.files import IMAGE_SUFFIXES
from voxelfield.installed import MissingPackageError
from voxelfield.interrupt import Interrupt, Interrupted
from voxelfield.messages import error_in_words, in_shell
from voxelfield.models.component import named_losses
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import visible_samples
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.run_directory import (
    EVENTS,
    HYDRA_RECORDS,
    METRICS,
    MODEL_FILE,
    RESULTS,
    RunDirectoryLock,
    check_ended,
    checkpoint_step,
    checkpoints,
)
from voxelfield.runs.results import Timing, evaluated_split, finish, finished_metrics
from voxelfield.runs.watching import TrainingViewer
from voxelfield.settings import RunConfig
from voxelfield.settings.resolve import AutoTrainer, planned, resolve
from voxelfield.settings.schema import AUTO, SceneConfig, parse_recorded
from voxelfield.trained.checkpoint_file import contents_of, load_newest, load_resolved, resolve_checkpoint
from voxelfield.training.checkpoints import check_complete, recorded_settings
from voxelfield.training.execution import reproducible
from voxelfield.training.memory import explain_shortage
from voxelfield.training.session import Session
from voxelfield.training.state import TrainingState
from voxelfield.warps.warp import Warp

logger = logging.getLogger(__name__)


def train_as_configured(
    settings: RunConfig,
    run_directory: Path,
    root: Path,
    *,
    auto: AutoTrainer | None = None,
    lock: RunDirectoryLock | None = None,
    found: FoundScene | None = None,
) -> dict[str, Any] | None:
    """Trains and evaluates according to a configuration.

    Of several processes that train together, the first one writes all files but the views that others have rendered.

    Args:
        settings: All settings of the run.
        run_directory: Folder for checkpoints, logs, images and ``metrics.json``.
        root: Base folder of relative paths in the settings.
        auto: Chooses the trainer for the scene; None if it is chosen.
        lock: The lock of the run directory, if the caller has taken it.
        found: The scene, if the caller has found its folder.

    Returns:
        The content of ``metrics.json``, or None if training was interrupted; processes other than the first, which need
        not wait for its checkpoint, then return an empty one.

    Raises:
        ValueError: The configuration is invalid, needs more memory than is free on the GPU, or names a directory that
            another run is using; the message names the key.
        FileNotFoundError: The scene, the checkpoint or a file that LPIPS needs does not exist.
        FileExistsError: A rendered view would replace an image that voxelfield has not written.
        MissingPackageError: The scene's format or LPIPS needs a package that is not installed.
        OSError: A result cannot be written.
    """
    with contextlib.ExitStack() as stack:
        if lock is None and processes.is_first():
            lock = stack.enter_context(RunDirectoryLock(run_directory))
        interrupt = stack.enter_context(Interrupt())
        stack.enter_context(reproducible(settings.deterministic))
        load = functools.cache(functools.partial(_load, settings, root, found))
        if settings.logger.viewer and processes.count() > 1:
            raise ValueError(f"logger.viewer must be false for {processes.count()} processes, got true")
        viewer = TrainingViewer(settings.logger) if settings.logger.viewer else None
        timing = Timing()
        try:
            with interrupt.at_once():
                # The scene is loaded only once the settings are known to ask for a training, unless they depend on it.
                if auto is not None:
                    settings = auto.choose(settings, *load())
                settings = planned(settings)
                metrics = finished_metrics(run_directory, settings) if settings.resume == AUTO else None
                if metrics is not None:
                    logger.info("the run in %s is finished: PSNR %.2f dB", run_directory, metrics["psnr"])
                    if metrics["steps"] not in map(checkpoint_step, checkpoints(run_directory)):
                        logger.warning("there is no checkpoint of its last step: training cannot be extended")
                    return metrics
                session = _begin(settings, load, run_directory, root, timing, viewer, lock)
        except Interrupted:
            logger.warning("stopped before training began")
            return None
        try:
            if not session.fit(wait=False):
                if not processes.is_first():
                    return {}
                session.wait()
                logger.warning("stopped after step %d; %s", session.step, _how_to_go_on(session))
                return None
            timing.end("train")
            with interrupt.at_once(), explain_shortage(session.estimate_memory, session.device):
                if viewer is not None:
                    viewer.finish(session)
                metrics = finish(session, settings, run_directory, timing, lock)
            if viewer is not None and settings.logger.viewer_keep:
                with contextlib.suppress(Interrupted), interrupt.at_once():
                    viewer.wait()
            return metrics
        except Interrupted:
            session.wait()
            logger.warning("stopped while evaluating; %s", _how_to_go_on(session))
            return None
        except Exception as error:
            with contextlib.suppress(OSError):  # the first error is the one to report
                session.wait()
            if isinstance(error, OSError):
                raise OSError(f"{error}; {_how_to_go_on(session)}") from error
            raise
        finally:
            session.records.close()
            if viewer is not None:
                viewer.end()


def _load(settings: RunConfig, root: Path, found: FoundScene | None) -> tuple[Scene, Warp | None]:
    """Loads the scene and chooses its warp; meanwhile, prepares the device for training."""
    device = choose_device(settings.device)
    named_losses(settings.losses)
    if settings.trainer.evaluation.lpips:
        check_lpips()
    loggers = _loggers(settings)
    for each in loggers:
        each.check_installed()
    # Fail now if the kernels are not available, not after the images have been loaded.
    _library.ensure_loaded(device.type)
    with ThreadPoolExecutor(max_workers=1) as background:
        # An error is not looked at: the same step fails again where it is needed, with a better message.
        background.submit(_warm_up, settings, device, loggers)
        scene = load_configured_scene(settings, root, found=found)
    if device.type == "cpu":
        keep_freed_memory()
    return scene, settings.model.choose_warp(scene, settings.warp)


def _warm_up(settings: RunConfig, device: torch.device, loggers: Sequence[LoggerSettings]) -> None:
    """Makes slow preparations for training, each about a second, in parallel with the decoding of images."""
    if device.type == "cuda":
        if processes.count() > 1:
            processes.sum_of(torch.zeros(1, device=device))  # connects the GPUs
        else:
            _load_kernels(settings, device)
            gc.collect()  # the field that was trained, and its graph, refer to each other
    for each in loggers:
        each.library()


def _load_kernels(settings: RunConfig, device: torch.device) -> None:
    """Trains on a small black view and evaluates it, because CUDA loads a kernel when it is first launched.

    Loading all kernels of a training and its evaluation takes about two thirds of a second.
    """
    cameras = Cameras(torch.eye(4)[None], torch.full((1, 4), float(WINDOW)), WINDOW, WINDOW)
    split = Split(torch.zeros(1, WINDOW, WINDOW, 4, dtype=torch.uint8), cameras, ("black",))
    box, trainer = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0)), settings.trainer
    trainer = replace(trainer, occupancy=replace(trainer.occupancy, start=1, every=1))
    model = replace(settings.model, environment="none")
    config = replace(settings, scene=SceneConfig("black", box), model=model, trainer=trainer)
    scene = Scene("black", torch.tensor(box), {"train": split})
    state = TrainingState(config, scene, device, "device", (), {}, visible_samples)
    for _ in range(6):  # of which the last are replays of a graph
        state.prepare_step()
        state.take_step()
    view = state.model.renderer(few=True).view
    evaluate_split(view, split, state.model.background, on_view=[Thumbnails(1).add], progress=False)


def _begin(
    settings: RunConfig,
    load: Callable[[], tuple[Scene, Warp | None]],
    run_directory: Path,
    root: Path,
    timing: Timing,
    viewer: TrainingViewer | None,
    lock: RunDirectoryLock | None,
) -> Session:
    """Loads the checkpoint to resume from, if any, and the scene, and builds the field."""
    resumed = load_to_resume(settings, run_directory, root)
    in_place = resumed is not None and resumed[0].resolve().parent == run_directory.resolve()
    earlier = [] if in_place else earlier_run(run_directory)
    if earlier:
        found = ", ".join(earlier)
        logger.warning("%s holds an earlier run (%s), which this one will partly overwrite", run_directory, found)
    scene, warp = load()
    evaluated, split = evaluated_split(scene)
    small = int(split.cameras.all_sizes().amin(dim=1).argmin())
    if min(split.cameras.size(small)) < WINDOW:
        raise ValueError(
            f"{split.source_of(small)}: images that are evaluated must be at least {WINDOW}x{WINDOW} pixels, the "
            f"window of SSIM, got {'x'.join(map(str, split.cameras.size(small)))}: load them larger, or leave them out"
        )
    if settings.trainer.evaluation.save_images:
        check_pictures("hydra.run.dir", run_directory / evaluated, split.names)
    timing.end("load")
    logger.info("building the field")
    on_step = None if viewer is None else viewer.after_step
    chosen = settings if resumed is None else resumed[2]
    session = Session(scene, resolve(chosen, scene, warp), output=lock or run_directory, on_step=on_step)
    if resumed is not None:
        path, checkpoint, _ = resumed
        with contents_of(path):
            # Checkpoints of later steps are damaged, or the user chose to go back: training now takes another course.
            older = [file for file in checkpoints(run_directory) if checkpoint_step(file) <= checkpoint["step"]]
            session.restore(checkpoint, path=path, replaced=older if in_place else ())
        logger.info("resumed at step %d from %s", session.step, in_shell(path))
    if lock is None:  # the first process writes
        return session
    # Not earlier, so that a run that is rejected creates neither a file nor its directory.
    lock.created = False
    session.log = build_logger(settings, run_directory, session.step)
    session.records.text("config", f"```yaml\n{yaml.safe_dump(recorded_settings(settings), sort_keys=False)}```")
    if session.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(session.device)
    if viewer is not None:
        viewer.begin(session)
    return session


def _how_to_go_on(session: Session) -> str:
    path = session.checkpoint
    if path is None:
        return "there is no checkpoint to continue from"
    return f"continue with: voxelfield train resume={in_shell(path)}"


def load_to_resume(
    settings: RunConfig, run_directory: Path, root: Path
) -> tuple[Path, dict[str, Any], RunConfig] | None:
    """Loads the checkpoint from which training is to resume; None for a run that starts from the beginning.

    Returns the file, its content, and the settings with the environment that the run has chosen where they leave it to
    the photographs.

    Raises:
        ValueError: The checkpoint belongs to another model or scene, is damaged, or belongs to a run in progress.
        FileNotFoundError: The checkpoint does not exist.
    """
    if settings.resume is None:
        return None
    if settings.resume == AUTO:
        found = load_newest(run_directory)
        if found is None:
            logger.info("no checkpoint in %s to continue from: training starts from scratch", run_directory)
            return None
    else:
        path = root / settings.resume
        # The first process uses that directory itself if the run is resumed in place.
        if processes.is_first() and (folder := resolve_checkpoint(path).parent).resolve() != run_directory.resolve():
            check_ended(folder)
        found = load_resolved(path)
    path, state = found
    with contents_of(path):
        saved = parse_recorded(state["config"])
    if settings.model.environment == AUTO:
        settings = replace(settings, model=replace(settings.model, environment=saved.model.environment))
    if saved.model != settings.model:
        raise ValueError(
            f"resume must name a checkpoint of the configured model {asdict(settings.model)}, got one of "
            f"{asdict(saved.model)}"
        )
    name = saved.scene.name
    if name != settings.scene.name:
        raise ValueError(f"resume must name a checkpoint of scene={settings.scene.name}, got one of scene={name}")
    if saved.seed != settings.seed:
        raise ValueError(
            f"seed must be that of the checkpoint, {saved.seed}, because its random numbers continue, got "
            f"{settings.seed}"
        )
    with contents_of(path):
        check_complete(state)
    return path, state, settings


def load_configured_scene(
    settings: RunConfig, root: Path, splits: Sequence[str] = ("train", "test"), *, found: FoundScene | None = None
) -> Scene:
    """Loads the configured scene. Each process of a group reads its shard of the training images.

    If ``data.download`` is set, it is downloaded first, once for all processes. A scene that is already found is used
    if it is the configured one.
    """
    # A folder and not a name: the configuration already has the box of a configured scene.
    downloads, folder = settings.data.download, root / settings.data.root
    if found is None or found.folder != folder / settings.scene.name:
        if downloads and not processes.is_first():
            processes.barrier()
        found = find_scene(settings.scene.name, folder, download=downloads)
        if downloads and processes.is_first():
            processes.barrier()
    wanted = [each.scene_options for each in active(settings)] if "train" in splits else []
    options = {name: value for each in wanted for name, value in each.items()}
    return load_scene(found, **settings.load_options(splits=splits, divided=True, **options))


def _loggers(settings: RunConfig) -> list[LoggerSettings]:
    """Returns the settings of the loggers that a run has."""
    return [each for each in active(settings) if isinstance(each, LoggerSettings)]


def build_logger(settings: RunConfig, run_directory: Path, first_step: int) -> RunLogger:
    """Returns a logger that forwards records to all configured ones, of which those that cannot begin are left out."""
    opened = []
    for each in _loggers(settings):
        try:
            opened.append(each.open(run_directory, recorded_settings(settings), first_step))
        except MissingPackageError:
            raise
        except Exception as error:  # libraries may raise anything
            reason = error_in_words(error)
            logger.error("logger=%s failed (%s): it records nothing, and training continues", each.name, reason)
    return cast("RunLogger", SeveralLoggers(opened))


def check_results(directory: Path) -> None:
    """Raises ValueError if a directory has images or files with the names of results, but no records of a run."""
    if not directory.is_dir() or (directory / HYDRA_RECORDS[0]).is_dir() or checkpoints(directory):
        return
    present = [result for result in RESULTS if (directory / result).exists()]
    # A run writes its own images to subfolders.
    present += [path.name for path in sorted(directory.iterdir()) if path.suffix.lower() in IMAGE_SUFFIXES][:1]
    if present:
        raise ValueError(
            f"hydra.run.dir must be a new folder or that of an earlier run, got {directory}, which contains "
            f"{', '.join(present)} of something else: choose another folder"
        )


def earlier_run(directory: Path) -> list[str]:
    """Returns names of files that an earlier run left in a directory, at most one of each kind."""
    found = checkpoints(directory)[-1:] if directory.is_dir() else []
    found += [path for path in (directory / METRICS, directory / MODEL_FILE) if path.is_file()]
    return [path.name for path in (*found, *sorted(directory.glob(EVENTS))[-1:])]
