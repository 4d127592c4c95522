"""The end of a run: evaluates the trained field, and writes all results."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import voxelfield
from voxelfield.datasets.scene import Scene, Split
from voxelfield.evaluation.evaluation import Evaluation, picture_name, save_images, write_metrics, write_table
from voxelfield.export.model_file import save_model
from voxelfield.installed import MissingPackageError
from voxelfield.media.png import PngWriter
from voxelfield.media.video import write_video
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.training.cameras.refined_cameras import CAMERAS_FILE, write_cameras
from voxelfield.training.config import RunConfig
from voxelfield.training.session import Session
from voxelfield.training.state.finished import recorded_settings
from voxelfield.training.state.run_directory import METRICS, MODEL_FILE, PER_VIEW, REPORT, VIDEO, RunDirectoryLock
from voxelfield.training.state.run_paths import usual_path

logger = logging.getLogger(__name__)

# Bytes of rendered views that may wait on their device for compression, which on a CPU takes several times as long as
# their evaluation on a GPU. 200 views of 800 x 800 pixels take 384 MB.
_PICTURE_ROOM = 1 << 29


class Timing:
    """Divides the time since its creation into successive named parts.

    Attributes:
        seconds: Wall-clock seconds by part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def end(self, part: str) -> None:
        """Assigns the time since the last part to ``part``."""
        now = time.perf_counter()
        self.seconds[part], self._began = now - self._began, now


def evaluated_split(scene: Scene) -> tuple[str, Split]:
    """Returns the name and the views of the split to evaluate: the test split or, without one, the training split."""
    name = "test" if "test" in scene.splits else "train"
    return name, scene.split(name)


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
    cameras = evaluated_split(session.scene)[1].cameras
    room = max(1, _PICTURE_ROOM // (3 * cameras.width * cameras.height))
    # The compressing threads compete with the evaluating one for Python's interpreter lock, so there are few of them.
    images = PngWriter(max(1, (os.cpu_count() or 1) // 4), waiting=room)
    try:
        return _write_results(session, settings, run_directory, timing, images)
    finally:
        images.close(cancel=True)


def _write_results(
    session: Session, settings: RunConfig, directory: Path, timing: Timing, images: PngWriter
) -> dict[str, Any]:
    trained, config = session.result(), session.config.trainer
    refined, options = trained.cameras, config.evaluation
    results = _Results(directory)
    name, split = evaluated_split(session.scene)
    peak = torch.cuda.max_memory_allocated(session.device) if session.device.type == "cuda" else None
    # Results of an earlier state of the field must not be mistaken for those of this run until they are replaced.
    if options.save_images:
        with results.writing("removal of earlier images"):
            for view in split.names:
                (directory / name / picture_name(view)).unlink(missing_ok=True)
    logger.info("evaluating views rendered by %s", trained.backend)
    thumbnails = Thumbnails(len(split) if options.views is None else min(options.views, len(split)))
    save = save_images(directory / name, images)

    def on_view(*view: Any) -> None:
        if options.report:
            thumbnails.add(*view)
        if options.save_images:
            with contextlib.suppress(OSError):  # of an earlier image, which is reported when the writer is closed
                save(*view)

    evaluation = trained.evaluate(split, views=options.views, on_view=on_view)
    timing.end("evaluate")
    logger.info("%s over %d %s views", evaluation, len(evaluation.names), name)
    metrics = {
        **_measured(session, evaluation),
        **({} if peak is None else {"peak_gpu_gib": peak / 2**30}),
        **({} if refined is None else {"cameras": refined.changes()}),
        "settings": recorded_settings(settings),
        "split": name,
        "image_size": [split.cameras.width, split.cameras.height],
        "drawn_by": trained.backend,
        "seconds": timing.seconds,
    }
    with results.writing("removal of earlier results"):
        for file in (MODEL_FILE, VIDEO, REPORT):
            (directory / file).unlink(missing_ok=True)
    with results.writing(METRICS):
        write_metrics(directory / METRICS, metrics)
    with results.writing(PER_VIEW):
        write_table(directory / PER_VIEW, evaluation)
    cameras = session.scene.train.cameras if refined is None else refined.refined
    if refined is not None:
        with results.writing(CAMERAS_FILE):
            write_cameras(directory / CAMERAS_FILE, session.scene.train, cameras)
    if config.model_file != "none":
        with results.writing(MODEL_FILE):
            shown = cameras if config.model_file == "small" else None
            save_model(directory / MODEL_FILE, trained, quality=config.model_file, cameras=shown)
    if options.video_frames > 0:
        with results.writing(VIDEO):
            around = usual_path(trained, cameras, options.video_frames)
            write_video(directory / VIDEO, (view.rgb for view in trained.render_path(around)))
    with results.writing(name):
        images.close()
    unsaved: OSError | None = None
    try:
        session.wait()
    except OSError as error:  # the report is worth having all the same
        unsaved = error
    timing.end("write")
    logger.info("took %s", ", ".join(f"{part} {seconds:.1f} s" for part, seconds in timing.seconds.items()))
    reported = ("psnr", "ssim", "psnr_fitted", "ssim_fitted", "train_seconds")
    session.log.hyperparameters(asdict(session.config), {key: metrics[key] for key in reported if key in metrics})
    # The report reads the records, so they must be complete; nothing is recorded after this point.
    session.log.close()
    if options.report:
        # Imported here, because it is not needed before and takes a while.
        from voxelfield.report.page import write_report

        with results.writing(REPORT):
            logger.info("the report is in %s", write_report(directory, metrics, trained.config, thumbnails))
    if unsaved is not None:
        raise unsaved
    results.check()
    return metrics


class _Results:
    """Writes results one after another; an error in one of them does not prevent the others."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._missing: list[str] = []

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Logs an OSError or a missing package in a block that writes the result of a name."""
        try:
            RunDirectoryLock.renew(self._directory)
            yield
        except (OSError, MissingPackageError) as error:
            logger.error("%s: %s", self._directory / name, getattr(error, "strerror", None) or error)
            self._missing.append(name)

    def check(self) -> None:
        """Raises OSError if a result could not be written."""
        if self._missing:
            raise OSError(f"{', '.join(self._missing)} could not be written in {self._directory}")


def _measured(session: Session, evaluation: Evaluation) -> dict[str, Any]:
    """Returns the part of ``metrics.json`` that every run has."""
    device = session.device
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
        "psnr_per_view": dict(zip(evaluation.names, evaluation.scores["psnr"], strict=True)),
        "ssim_per_view": dict(zip(evaluation.names, evaluation.scores["ssim"], strict=True)),
        "per_view": evaluation.per_view(),
        "environment": {
            "voxelfield": voxelfield.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "none",
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "CPU threads": str(torch.get_num_threads()),
        },
        "estimated_gib": {name: size / 2**30 for name, size in asdict(session.estimate_memory()).items()},
        **_peak_host_memory(),
    }


def _peak_host_memory() -> dict[str, float]:
    """Returns the largest memory of this process on the host, in GiB; nothing on Windows."""
    try:
        import resource
    except ImportError:
        return {}
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 2**10
    return {"peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
