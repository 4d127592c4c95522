"""The end of a run: evaluates the trained field, and writes all results, or finds them all in its directory."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from voxelfield import processes
from voxelfield.components.refinement import write_cameras
from voxelfield.components.registry import active
from voxelfield.datasets.scene import Scene, Split
from voxelfield.devices import peak_bytes
from voxelfield.evaluation.evaluation import (
    Evaluation,
    check_pictures,
    picture_name,
    save_images,
    write_metrics,
    write_table,
)
from voxelfield.installed import VERSION, MissingPackageError
from voxelfield.media.png import BackgroundWriter
from voxelfield.media.video import write_video
from voxelfield.messages import clipped, in_shell
from voxelfield.progress import size_in_words, tracked
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import at_size, path_named
from voxelfield.report.page import write_report
from voxelfield.report.record import read_overrides
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.run_directory import (
    CAMERAS_FILE,
    METRICS,
    MODEL_FILE,
    PER_VIEW,
    REPORT,
    VIDEO,
    RunDirectoryLock,
    read_metrics,
)
from voxelfield.settings import RunConfig
from voxelfield.trained.model_file import save_model
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.training.checkpoints import changed_settings, recorded_settings
from voxelfield.training.session import Session

logger = logging.getLogger(__name__)

# Bytes of rendered views that may wait on their device for compression, which on a CPU takes several times as long as
# their evaluation on a GPU. 200 views of 800 x 800 pixels take 384 MB.
_PICTURE_ROOM = 1 << 29

# The video takes six seconds, or longer if its frames would follow one another faster than screens show them. Its
# images are never larger than those of the training, because the field was fitted to no finer detail.
_VIDEO_SECONDS, _VIDEO_FPS, _VIDEO_ROWS = 6, 30.0, 800


def finished_metrics(directory: Path, settings: RunConfig) -> dict[str, Any] | None:
    """Returns the metrics of a run that has done everything configured, or None if something is missing.

    Raises:
        ValueError: The finished run in the directory has other settings; the message names the first.
    """
    try:
        metrics = read_metrics(directory)
    except (OSError, ValueError):
        return None
    if metrics["steps"] < settings.trainer.steps or not math.isfinite(metrics["psnr"]):
        return None
    saved = metrics["settings"]
    for key, (before, now) in changed_settings(saved, settings).items():
        raise ValueError(
            f"{key} must be that of the finished run in {directory}, {clipped(repr(before))}, for resume=auto, got "
            f"{clipped(repr(now))}: choose another hydra.run.dir, or leave resume out to train anew there"
        )
    if changed_settings(saved, settings, evaluation=True):
        return None  # the run was evaluated in another way
    return metrics if all((directory / name).is_file() for name in _files_of(metrics, settings)) else None


def _files_of(metrics: Mapping[str, Any], settings: RunConfig) -> Iterator[str]:
    """Yields the names of the files that a finished run has written."""
    config = settings.trainer
    yield PER_VIEW
    yield from (name for each in active(settings) for name in each.results)
    if config.model_file != "none":
        yield MODEL_FILE
    if config.evaluation.video_frames > 0:
        yield VIDEO
    if config.evaluation.report:
        yield REPORT
    if config.evaluation.save_images:
        yield from (f"{metrics['split']}/{picture_name(view)}" for view in metrics["psnr_per_view"])


class Timing:
    """Measures the successive phases of a run: :attr:`seconds`, wall-clock, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def end(self, phase: str) -> None:
        """Assigns the time since the previous phase to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase], self._began = now - self._began, now


def evaluated_split(scene: Scene) -> tuple[str, Split]:
    """Returns the name and the views of the split to evaluate: the test split or, without one, the training split."""
    name = "test" if "test" in scene.splits else "train"
    return name, scene.split(name)


def write_results(session: Session, folder: Path | str | None = None) -> dict[str, Any]:
    """Evaluates what a session has trained and writes what ``python train.py`` leaves at the end of a run.

    That is the report, metrics, rendered views, the model file and the video, as ``trainer.evaluation`` and
    ``trainer.model_file`` say; earlier ones are replaced. The report has curves if the session's logger is a
    :class:`voxelfield.components.tensorboard.TensorBoardLogger` of the folder. Nothing is recorded afterwards. A
    collective call.

    Args:
        session: The session, usually after its last step.
        folder: Where to write; None for the session's output folder.

    Returns:
        The content of ``metrics.json``.

    Raises:
        ValueError: There is no folder, or another run is writing to it.
        OSError: A result cannot be written, or a view would replace an image that voxelfield has not written.
    """
    directory = session.output if folder is None else Path(folder)
    if directory is None:
        raise ValueError("folder must be given for a session without an output folder, got None")
    name, split = evaluated_split(session.scene)
    if session.config.trainer.evaluation.save_images:
        check_pictures("folder", directory / name, split.names)
    session.wait()
    timing = Timing()
    timing.seconds["train"] = session.train_seconds
    with RunDirectoryLock(directory, "folder") if processes.is_first() else contextlib.nullcontext() as lock:
        return finish(session, session.config, directory, timing, lock)


def finish(
    session: Session, settings: RunConfig, run_directory: Path, timing: Timing, lock: RunDirectoryLock | None = None
) -> dict[str, Any]:
    """Evaluates the test split; writes metrics, the model file, the video and the report, in this order.

    The rendered views are written as images at the same time. If one result cannot be written, the others still are,
    and OSError is raised in the end.

    A collective call of all processes that train together. The views and the frames of the video are divided among
    them. Each process writes the views that it has rendered; the first, which has the directory's lock, writes
    everything else.

    Returns:
        The content of ``metrics.json``, with the settings of the run as configured.
    """
    trained, options = session.result(), session.config.trainer.evaluation
    results = _Results(run_directory, lock)
    name, split = evaluated_split(session.scene)
    peak = peak_bytes(session.device) if session.device.type == "cuda" else None
    # Images of an earlier state of the field must not be mistaken for results of this run.
    if options.save_images and processes.is_first():
        with results.writing("removal of earlier images"):
            for view in split.names:
                (run_directory / name / picture_name(view)).unlink(missing_ok=True)
    processes.barrier()
    logger.info("evaluating views rendered by %s", trained.backend_for(split.cameras))
    thumbnails = Thumbnails(len(split) if options.views is None else min(options.views, len(split)))
    room = max(1, _PICTURE_ROOM // (3 * split.cameras.width * split.cameras.height))
    # The compressing threads compete with the evaluating one for Python's interpreter lock, so there are few of them.
    with BackgroundWriter(max(1, (os.cpu_count() or 1) // 4), waiting=room) as images:
        save = save_images(run_directory / name, images)

        def on_view(*view: Any) -> None:
            if options.report:
                thumbnails.add(*view)
            if options.save_images:
                with contextlib.suppress(OSError):  # of an earlier image, which is reported when the writer is closed
                    save(*view)

        evaluation = trained.evaluate(split, views=options.views, on_view=on_view)
        if options.report:
            thumbnails.gather()
            thumbnails.enlarge(trained, split, evaluation)
        logger.info("%s over %d %s views", evaluation, len(evaluation.names), name)
        metrics = _metrics(session, trained, name, split, evaluation)
        if peak is not None:
            metrics["peak_gpu_gib"] = peak / 2**30
        timing.end("evaluate")
        metrics |= {"settings": recorded_settings(settings), "seconds": timing.seconds}
        train = session.scene.train
        if trained.cameras is not None:
            train = replace(train, cameras=trained.cameras.refined)
        if processes.is_first():
            _write_files(trained, train, metrics, evaluation, results)
        if options.video_frames > 0:
            scene = (trained.model.centre, trained.model.warp, trained.render)
            path = path_named(None, train.cameras, options.video_frames, *scene)
            _write_video(trained, at_video_size(path), results)
        for component in (session.model, *session.components):
            with results.writing(component.name):
                component.write_results(run_directory)
        with results.writing(name):
            images.close()
        results.gather()
    unsaved: OSError | None = None
    try:
        session.wait()
    except OSError as error:  # the report is worth having all the same
        unsaved = error
    timing.end("write")
    logger.info("took %s", ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in timing.seconds.items()))
    reported = ("psnr", "ssim", "psnr_fitted", "ssim_fitted", "train_seconds")
    overrides = read_overrides(run_directory) or ()
    given = {key: value for key, _, value in (text.lstrip("+").partition("=") for text in overrides)}
    session.records.hyperparameters(given, {key: metrics[key] for key in reported if key in metrics})
    # The report reads the records, so they must be complete; nothing is recorded after this point.
    session.records.close()
    if options.report and processes.is_first():
        with results.writing(REPORT):
            report = write_report(run_directory, metrics, trained.config, thumbnails)
            logger.info("the report is %s (%s, opens in a browser)", in_shell(report), size_in_words(report))
    if unsaved is not None:
        raise unsaved
    results.check()
    return metrics


def _write_files(
    trained: TrainedModel, train: Split, metrics: dict[str, Any], evaluation: Evaluation, results: _Results
) -> None:
    """Writes the metrics and the trained model; ``train`` has the refined cameras, if cameras were refined."""
    directory, quality = results.directory, trained.trainer.model_file
    with results.writing("removal of earlier results"):
        for file in (MODEL_FILE, VIDEO, REPORT):
            (directory / file).unlink(missing_ok=True)
    with results.writing(METRICS):
        write_metrics(directory / METRICS, metrics)
    with results.writing(PER_VIEW):
        write_table(directory / PER_VIEW, evaluation)
    if trained.cameras is not None:
        with results.writing(CAMERAS_FILE):
            write_cameras(directory / CAMERAS_FILE, train, train.cameras, trained.config.scene.origin)
    if quality != "none":
        with results.writing(MODEL_FILE):
            shown = train.cameras if quality == "small" else None
            save_model(directory / MODEL_FILE, trained, quality=quality, cameras=shown)


def at_video_size(cameras: Cameras) -> Cameras:
    """Returns the same views in images of at most 800 rows."""
    rows = min(cameras.height, _VIDEO_ROWS)
    return at_size(cameras, max(1, round(cameras.width * rows / cameras.height)), rows)


def _write_video(trained: TrainedModel, cameras: Cameras, results: _Results) -> None:
    """Writes a video along a path, whose frames all processes render and the first encodes."""
    rounds = range(0, len(cameras), processes.count())
    local = [min(first + processes.rank(), len(cameras) - 1) for first in rounds]
    views = zip(rounds, trained.render_path(cameras[local]), strict=True)
    # The images (H, W, 3), in the first process, a round of one image per process at a time.
    frames = (frame for first, view in views for frame in processes.gather_to_first(view.rgb)[: len(cameras) - first])
    if processes.is_first():
        with results.writing(VIDEO):
            drawn = tracked(frames, "rendering frames", len(cameras))
            write_video(results.directory / VIDEO, drawn, min(len(cameras) / _VIDEO_SECONDS, _VIDEO_FPS))
    if processes.count() > 1:
        for _ in frames:  # to the end also after an error, because the other processes wait for each of them
            pass


class _Results:
    """Writes results one after another; an error in one of them does not prevent the others."""

    def __init__(self, directory: Path, lock: RunDirectoryLock | None) -> None:
        self.directory, self._lock = directory, lock
        self._missing: list[str] = []

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Logs an OSError or a missing package in a block that writes the result of a name."""
        try:
            if self._lock is not None:
                self._lock.renew()
            yield
        except (OSError, MissingPackageError) as error:
            logger.error("%s: %s", self.directory / name, getattr(error, "strerror", None) or error)
            self._missing.append(name)

    def gather(self) -> None:
        """Adds the results that other processes could not write; a collective call."""
        missing = processes.gather_objects(self._missing)
        self._missing = [*dict.fromkeys(name for names in missing for name in names)]

    def check(self) -> None:
        """Raises OSError if a result could not be written."""
        if self._missing:
            raise OSError(f"{', '.join(self._missing)} could not be written in {self.directory}")


def _metrics(
    session: Session, trained: TrainedModel, split_name: str, split: Split, evaluation: Evaluation
) -> dict[str, Any]:
    """Returns the quality and the cost of a trained model, and on which views and machine they were measured.

    A collective call in processes that train together.
    """
    device = trained.model.device
    metrics = {
        **evaluation.means(),
        "baking_cost": trained.baking_cost(split, evaluation),
        "views": len(evaluation.names),
        "split": split_name,
        "image_size": [split.cameras.width, split.cameras.height],
        "drawn_by": trained.backend_for(split.cameras),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "resolution": list(trained.model.grid.resolution),
        "psnr_per_view": dict(zip(evaluation.names, evaluation.scores["psnr"], strict=True)),
        "ssim_per_view": dict(zip(evaluation.names, evaluation.scores["ssim"], strict=True)),
        "per_view": evaluation.per_view(),
        "environment": {
            "voxelfield": VERSION,
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "none",
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "CPU threads": str(torch.get_num_threads()),
        },
        "scene": session.scene.name,
        "diverged": session.diverged or None,
        "train_seconds": session.train_seconds,
        "train_views": len(session.scene.train),
        "masked": {name: found for name, each in session.scene.splits.items() if (found := each.masked())} or None,
        "steps": session.step,
        "estimated_gib": {name: size / 2**30 for name, size in asdict(session.estimate_memory()).items()},
        "peak_host_gib": _peak_host_gib(),
        "cameras": None if trained.cameras is None else trained.cameras.changes(),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def _peak_host_gib() -> float | None:
    """Returns the largest memory of this process on the host, in GiB; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
