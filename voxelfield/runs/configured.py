"""A complete run from a configuration: load, train, evaluate, write results."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from voxelfield import _library
from voxelfield.datasets.loading import load_scene
from voxelfield.datasets.locate import find_scene
from voxelfield.datasets.scene import Scene, Split
from voxelfield.devices import choose_device
from voxelfield.evaluation.evaluation import Evaluation, check_pictures, picture_name, write_metrics, write_table
from voxelfield.evaluation.lpips import check_lpips
from voxelfield.export.model_file import save_model
from voxelfield.media.png import PngWriter
from voxelfield.media.video import write_views
from voxelfield.messages import clipped
from voxelfield.models.model_config import ModelConfig
from voxelfield.report.surroundings import chosen_settings, environment, given_overrides, peak_host_gib
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.runs.results import Results
from voxelfield.runs.timing import Timing
from voxelfield.runs.warm_up import warm_up
from voxelfield.training.cameras.refined_cameras import CAMERAS_FILE, write_cameras
from voxelfield.training.config import LoggerConfig, RunConfig, parse
from voxelfield.training.config.run import AUTO
from voxelfield.training.determinism import reproducible
from voxelfield.training.interrupt import Interrupt, Interrupted
from voxelfield.training.logs.failsafe_logger import FailsafeLogger
from voxelfield.training.logs.logging import NullLogger, RunLogger, TensorBoardLogger, flatten_config
from voxelfield.training.memory import explain_shortage
from voxelfield.training.session import Session
from voxelfield.training.state.checkpoint import (
    check_progress,
    checkpoint_step,
    checkpoints,
    contents_of,
    load_newest,
    load_resolved,
    resolve_checkpoint,
)
from voxelfield.training.state.finished import finished_metrics, recorded_settings
from voxelfield.training.state.run_directory import (
    METRICS,
    MODEL_FILE,
    PER_VIEW,
    REPORT,
    VIDEO,
    RunDirectoryLock,
    check_ended,
    earlier_run,
)
from voxelfield.training.state.run_paths import usual_path
from voxelfield.warps.warp import Warp

logger = logging.getLogger(__name__)

# Bytes of rendered views that may wait on their device for compression, which on a CPU takes several times as long as
# their evaluation on a GPU. 200 views of 800 x 800 pixels take 384 MB.
_PICTURE_ROOM = 1 << 29


class Watcher(Protocol):
    """Observes a session during training. Its methods must not raise."""

    def begin(self, session: Session) -> None:
        """Called once, before the first step."""

    def after_step(self, session: Session) -> None:
        """Called after every step, like a session's ``on_step``."""

    def end(self) -> None:
        """Called once after :meth:`begin`, when the run has ended for any reason."""


def train_as_configured(
    settings: RunConfig,
    run_directory: Path,
    root: Path,
    watcher: Watcher | None = None,
    for_scene: Callable[[Scene, Warp | None], RunConfig] | None = None,
) -> dict[str, Any] | None:
    """Trains and evaluates according to a configuration.

    Args:
        settings: All settings of the run.
        run_directory: Folder for checkpoints, logs, images and ``metrics.json``.
        root: Base folder of relative paths in the settings.
        watcher: An observer of training.
        for_scene: Returns the settings to use in place of these for the loaded scene and its warp; None if they do not
            depend on it.

    Returns:
        The content of ``metrics.json``, or None if training was interrupted.

    Raises:
        ValueError: The configuration is invalid, needs more memory than is free on the GPU, or names a directory that
            another run is using; the message names the key.
        FileNotFoundError: The scene, the checkpoint or a file that LPIPS needs does not exist.
        FileExistsError: A rendered view would replace an image that voxelfield has not written.
        MissingPackageError: The scene's format or LPIPS needs a package that is not installed.
        OSError: A result cannot be written.
    """
    with RunDirectoryLock.acquire(run_directory), Interrupt() as interrupt, reproducible(settings.deterministic):
        return _train(settings, run_directory, root, interrupt, watcher, for_scene)


def _train(
    settings: RunConfig,
    run_directory: Path,
    root: Path,
    interrupt: Interrupt,
    watcher: Watcher | None,
    for_scene: Callable[[Scene, Warp | None], RunConfig] | None,
) -> dict[str, Any] | None:
    """Implements :func:`train_as_configured` for a directory that this process has locked."""
    timing = Timing()
    session: Session | None = None
    try:
        with interrupt.at_once():
            # Only once the settings are known to ask for a training, unless they depend on the scene.
            load = functools.cache(functools.partial(_load, settings, root))
            if for_scene is not None:
                settings = for_scene(*load())
            if settings.resume == AUTO:
                metrics = finished_metrics(run_directory, settings)
                if metrics is not None:
                    logger.info("the run in %s is finished: PSNR %.2f dB", run_directory, metrics["psnr"])
                    if metrics["steps"] not in map(checkpoint_step, checkpoints(run_directory)):
                        logger.warning("there is no checkpoint of its last step: training cannot be extended")
                    return metrics
            session = _begin(settings, load, run_directory, root, timing, watcher)
        if not session.fit(wait=False):
            session.wait()
            logger.warning("stopped after step %d; %s", session.step, _how_to_go_on(session))
            return None
        timing.end("train")
        with interrupt.at_once(), explain_shortage(session.estimate_memory, session.device):
            metrics = finish(session, settings, run_directory, timing)
    except Interrupted:
        if session is None:
            logger.warning("stopped before training began")
            return None
        session.wait()
        logger.warning("stopped while evaluating; %s", _how_to_go_on(session))
        return None
    except Exception as error:
        if session is None:
            raise
        with contextlib.suppress(OSError):  # the first error is the one to report
            session.wait()
        if isinstance(error, OSError):
            raise OSError(f"{error}; {_how_to_go_on(session)}") from error
        raise
    finally:
        if session is not None:
            session.log.close()
            if watcher is not None:
                watcher.end()
    return metrics


def _load(settings: RunConfig, root: Path) -> tuple[Scene, Warp | None]:
    """Loads the scene and chooses its warp; in the meantime, loads what training on the device needs."""
    device = choose_device(settings.device)
    if settings.trainer.evaluation.lpips:
        check_lpips()
    # Fail now if the kernels are not available, not after the images have been loaded.
    _library.ensure_loaded(device.type)
    with ThreadPoolExecutor(max_workers=1) as background:
        ready = background.submit(warm_up, device, settings.logger)
        scene = load_configured_scene(settings, root)
        if (error := ready.exception()) is not None:
            # Whatever fails here fails again where it is needed, with a better message.
            logger.debug("preparations failed: %s", error)
    return scene, settings.model.choose_warp(scene, settings.warp)


def _begin(
    settings: RunConfig,
    load: Callable[[], tuple[Scene, Warp | None]],
    run_directory: Path,
    root: Path,
    timing: Timing,
    watcher: Watcher | None,
) -> Session:
    """Loads the checkpoint to resume from, if any, and the scene, and builds the field."""
    resumed = load_to_resume(settings, run_directory, root)
    in_place = resumed is not None and resumed[0].resolve().parent == run_directory.resolve()
    earlier = [] if in_place else earlier_run(run_directory)
    if earlier:
        found = ", ".join(earlier)
        logger.warning("%s holds an earlier run (%s), which this one will partly overwrite", run_directory, found)
    scene, warp = load()
    if settings.trainer.evaluation.save_images:
        evaluated, split = _evaluated_split(scene)
        check_pictures("hydra.run.dir", run_directory / evaluated, split.names)
    timing.end("load")
    on_step = None if watcher is None else watcher.after_step
    session = Session.from_config(scene, settings, warp=warp, output=run_directory, on_step=on_step)
    first_step = 0
    if resumed is not None:
        path, checkpoint = resumed
        first_step = checkpoint["step"]
        # Checkpoints of later steps are damaged, or the user chose to go back: training now takes another course.
        older = [file for file in checkpoints(run_directory) if checkpoint_step(file) <= first_step]
        with contents_of(path):
            session.restore(checkpoint, path=path, replaced=older if in_place else ())
        logger.info("resumed at step %d from %s", session.step, path)
    # Not earlier, so that a run that is rejected creates neither a file nor its directory.
    with RunDirectoryLock.acquire(run_directory) as lock:
        lock.created = False
    session.log = FailsafeLogger(build_logger(settings.logger, run_directory, first_step))
    session.log.text("config", f"```yaml\n{yaml.safe_dump(recorded_settings(settings), sort_keys=False)}```")
    if session.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(session.device)
    if watcher is not None:
        watcher.begin(session)
    return session


def _how_to_go_on(session: Session) -> str:
    path = session.checkpoint
    return "there is no checkpoint to continue from" if path is None else f"continue with resume={path}"


def load_to_resume(settings: RunConfig, run_directory: Path, root: Path) -> tuple[Path, dict[str, Any]] | None:
    """Loads the checkpoint from which training is to resume.

    Args:
        settings: Settings of the resuming run.
        run_directory: Folder that is searched with ``resume=auto``.
        root: Base folder of relative paths.

    Returns:
        The file and its content, or None for a run that starts from the beginning.

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
        check_ended(resolve_checkpoint(root / settings.resume).parent)
        found = load_resolved(root / settings.resume)
    path, state = found
    with contents_of(path):
        kept = state["config"]["model"]
        model, name = parse(ModelConfig, kept, "model of the checkpoint"), state["config"]["scene"]["name"]
        seed = state["config"]["seed"]
    if model != settings.model:
        raise ValueError(
            f"resume must name a checkpoint of the configured model {asdict(settings.model)}, got one of {kept}"
        )
    if name != settings.scene.name:
        raise ValueError(f"resume must name a checkpoint of scene={settings.scene.name}, got one of scene={name}")
    if seed != settings.seed:
        raise ValueError(
            f"seed must be that of the checkpoint, {clipped(repr(seed))}, because its random numbers continue, got "
            f"{settings.seed}"
        )
    with contents_of(path):
        check_progress(state)
    return found


def load_configured_scene(settings: RunConfig, root: Path, splits: Sequence[str] = ("train", "test")) -> Scene:
    """Loads the configured scene, downloading it first if ``data.download`` is set.

    Args:
        settings: Settings of the run.
        root: Base folder of a relative ``data.root``.
        splits: Names of the splits to read.
    """
    # A folder and not a name: the configuration already has the box of a configured scene.
    folder = find_scene(settings.scene.name, root / settings.data.root, download=settings.data.download)
    return load_scene(folder, **settings.load_options(splits=splits))


def build_logger(config: LoggerConfig, run_directory: Path, first_step: int) -> RunLogger:
    """Returns the configured logger, which hides records of an interrupted run after ``first_step``."""
    if config.name == "none":
        return NullLogger()
    try:
        chosen = chosen_settings(given_overrides(run_directory) or ())
        return TensorBoardLogger(run_directory, first_step, chosen)
    except OSError as error:
        logger.error("TensorBoardLogger failed (%s): nothing is recorded, and training continues", error)
        return NullLogger()


def finish(session: Session, settings: RunConfig, run_directory: Path, timing: Timing) -> dict[str, Any]:
    """Evaluates the test split; writes metrics, the model file, the video and the report, in this order.

    The rendered views are written as images at the same time. If one result cannot be written, the others still are.

    Args:
        session: The trained session.
        settings: The settings of the run as configured, for ``metrics.json``.
        run_directory: Folder for the results.
        timing: Durations of the run's parts.

    Returns:
        The metrics.

    Raises:
        OSError: A result could not be written.
    """
    if not session.config.trainer.evaluation.save_images:
        return _write_results(session, settings, run_directory, timing, None)
    cameras = _evaluated_split(session.scene)[1].cameras
    room = max(1, _PICTURE_ROOM // (3 * cameras.width * cameras.height))
    # The compressing threads compete with the evaluating one for Python's interpreter lock, so there are few of them.
    with PngWriter(max(1, (os.cpu_count() or 1) // 4), waiting=room) as pictures:
        return _write_results(session, settings, run_directory, timing, pictures)


def _evaluated_split(scene: Scene) -> tuple[str, Split]:
    """Returns the name and the views of the split to evaluate.

    If a capture has no held-out views, this is the training split.
    """
    evaluated = "test" if "test" in scene.splits else "train"
    return evaluated, scene.split(evaluated)


def _write_results(
    session: Session, settings: RunConfig, run_directory: Path, timing: Timing, pictures: PngWriter | None
) -> dict[str, Any]:
    """Implements :func:`finish`, with the writer of images if they are wanted."""
    config, device = session.config.trainer, session.device
    options = config.evaluation
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    trained = session.result()
    results = Results(run_directory)
    logger.info("evaluating views rendered by %s", trained.backend)
    evaluated, split = _evaluated_split(session.scene)
    evaluation: Evaluation | None = None
    thumbnails = Thumbnails(len(split) if options.views is None else min(options.views, len(split)))
    on_view = thumbnails.add if options.report else None
    if pictures is not None:
        with results.writing(evaluated):
            _remove_pictures(run_directory / evaluated, split.names)
            evaluation = trained.evaluate(
                split, views=options.views, images=run_directory / evaluated, on_view=on_view, writer=pictures
            )
    if evaluation is None:
        if pictures is not None:
            pictures.close(cancel=True)
            pictures = None
        evaluation = trained.evaluate(split, views=options.views, on_view=on_view)
    metrics = describe(session, evaluation)
    metrics["settings"] = recorded_settings(settings)
    metrics["split"], metrics["image_size"] = evaluated, [split.cameras.width, split.cameras.height]
    if trained.cameras is not None:
        metrics["cameras"] = trained.cameras.changes()
    metrics["drawn_by"] = trained.backend
    if peak is not None:
        metrics["peak_gpu_gib"] = peak
    timing.end("evaluate")
    metrics["seconds"] = timing.seconds()
    # Results of fewer steps must not be mistaken for those of this run until they are replaced.
    with results.writing("removal of earlier results"):
        for name in (MODEL_FILE, VIDEO, REPORT):
            (run_directory / name).unlink(missing_ok=True)
    with results.writing(METRICS):
        write_metrics(run_directory / METRICS, metrics)
    with results.writing(PER_VIEW):
        write_table(run_directory / PER_VIEW, evaluation)
    logger.info("%s over %d %s views", evaluation, len(evaluation.names), evaluated)
    cameras = session.scene.train.cameras
    if trained.cameras is not None:
        cameras = trained.cameras.refined
        with results.writing(CAMERAS_FILE):
            write_cameras(run_directory / CAMERAS_FILE, session.scene.train, cameras)
    if config.model_file != "none":
        shown = cameras if config.model_file == "small" else None
        with results.writing(MODEL_FILE):
            save_model(run_directory / MODEL_FILE, trained, quality=config.model_file, cameras=shown)
    if options.video_frames > 0:
        around = usual_path(trained, cameras, options.video_frames)
        with results.writing(VIDEO):
            write_views(run_directory / VIDEO, (view.rgb for view in trained.render_path(around)))
    if pictures is not None:
        with results.writing(evaluated):
            pictures.close()
    failed: OSError | None = None
    try:
        session.wait()
    except OSError as error:  # the report is worth having all the same
        failed = error
    timing.end("write")
    logger.info("took %s", timing)
    reported = ("psnr", "ssim", "psnr_fitted", "ssim_fitted", "train_seconds")
    final = {name: value for name, value in metrics.items() if name in reported}
    session.log.hyperparameters(flatten_config(asdict(session.config)), final)
    # The report reads the records, so they must be complete; nothing is recorded after this point.
    session.log.close()
    if options.report:
        with results.writing(REPORT):
            _report(run_directory, metrics | {"seconds": timing.seconds()}, trained.config, thumbnails)
    if failed is not None:
        raise failed
    results.check()
    return metrics


def _remove_pictures(folder: Path, views: Sequence[str]) -> None:
    """Removes images of an earlier state of the field, so that a run which is killed does not look finished."""
    check_pictures("hydra.run.dir", folder, views)
    for view in views:
        (folder / picture_name(view)).unlink(missing_ok=True)


def _report(run_directory: Path, metrics: dict[str, Any], config: RunConfig, thumbnails: Thumbnails) -> None:
    """Writes the report. An error other than that of the disk is logged and does not fail the run."""
    # Imported here, because it is not needed before and takes a while.
    from voxelfield.report.writing import write_report

    try:
        path = write_report(run_directory, metrics, config, thumbnails)
    except OSError:
        raise
    except Exception as error:  # the run itself has succeeded
        logger.exception("no report was made: %s", error)
        return
    logger.info("the report is in %s", path)


def describe(session: Session, evaluation: Evaluation) -> dict[str, Any]:
    """Returns the content of ``metrics.json``."""
    device, host = session.device, peak_host_gib()
    return {
        "scene": session.scene.name,
        **evaluation.means(),
        **({"diverged": True} if session.diverged else {}),
        "views": len(evaluation.names),
        "train_seconds": session.train_seconds,
        "train_views": len(session.scene.train),
        "steps": session.step,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "resolution": list(session.model.grid.resolution),
        "psnr_per_view": dict(zip(evaluation.names, evaluation.psnr_per_view, strict=True)),
        "ssim_per_view": dict(zip(evaluation.names, evaluation.ssim_per_view, strict=True)),
        "per_view": evaluation.per_view(),
        "environment": environment(),
        "estimated_gib": {name: size / 2**30 for name, size in asdict(session.estimate_memory()).items()},
        **({} if host is None else {"peak_host_gib": host}),
    }
