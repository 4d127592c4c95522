"""One run from configuration to results: load, train, evaluate, write."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from voxelfield import _library
from voxelfield.datasets.loading import load_scene
from voxelfield.datasets.scene import Scene
from voxelfield.devices import choose_device
from voxelfield.export.model_file import MODEL_FILE
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.rendering.cameras import orbit
from voxelfield.training.checkpoint import load_checkpoint, resolve_checkpoint
from voxelfield.training.config import LoggerConfig, RunConfig, parse
from voxelfield.training.evaluation import Evaluation, write_metrics, write_table
from voxelfield.training.logging import NullLogger, RunLogger, TensorBoardLogger, flatten_config
from voxelfield.training.lpips import check_lpips
from voxelfield.training.session import Session
from voxelfield.training.timing import Timing
from voxelfield.training.video import video_frames, write_video

logger = logging.getLogger(__name__)


def train_as_configured(config: DictConfig, run_directory: Path, root: Path) -> dict[str, Any] | None:
    """Trains and evaluates as configured.

    Args:
        config: The composed configuration (``configs/train.yaml``).
        run_directory: Receives checkpoints, logs, pictures and ``metrics.json``.
        root: Folder that relative paths in the configuration start from.

    Returns:
        What was written to ``metrics.json``, or None if training was interrupted.

    Raises:
        ValueError: The configuration does not make sense, or needs more memory than the GPU has free; the message names
            the key.
        FileNotFoundError: The scene, the checkpoint or what LPIPS needs is not there.
        MissingPackageError: The scene's format or LPIPS needs a package that is not installed.
    """
    timing = Timing()
    settings = parse(RunConfig, config)
    device = choose_device(settings.device)
    if settings.trainer.evaluation.lpips:
        check_lpips()
    # Kernels that cannot be had are to be missed now, not once the images are loaded.
    _library.ensure_loaded(device.type)
    checkpoint = None if settings.resume is None else load_to_resume(root / settings.resume, settings)
    with ThreadPoolExecutor(max_workers=1) as background:
        ready = background.submit(make_ready, device, settings.logger)
        scene = load_configured_scene(settings, root)
        ready.result()
    timing.end("load")
    session = Session.from_config(scene, settings, output=run_directory)
    # Not before: a run that is refused leaves no file.
    first_step = 0 if checkpoint is None else checkpoint["step"]
    session.log = log = build_logger(settings.logger, run_directory, first_step)
    log.text("config", f"```yaml\n{OmegaConf.to_yaml(config, resolve=True)}```")
    if checkpoint is not None:
        session.restore(checkpoint)
        logger.info("resumed at step %d", session.step)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if not session.fit(wait=False):
        session.wait()
        log.close()
        logger.warning("stopped after step %d; continue with resume=%s", session.step, run_directory)
        return None
    timing.end("train")
    try:
        metrics = finish(session, run_directory, timing)
    finally:
        session.wait()
    timing.end("write")
    logger.info("took %s", timing)
    final = {name: metrics[name] for name in ("psnr", "ssim", "train_seconds")}
    log.hyperparameters(flatten_config(asdict(settings)), final)
    log.close()
    return metrics


def make_ready(device: torch.device, logger: LoggerConfig) -> None:
    """Does beforehand what training begins with, and what takes a second each: meant for the time of decoding images.

    Args:
        device: Where training takes place; its context is created.
        logger: The configured logger; what it needs is imported.
    """
    torch.zeros((), device=device)
    if logger.name == "tensorboard" and importlib.util.find_spec("tensorboard") is not None:
        importlib.import_module("torch.utils.tensorboard")


def load_to_resume(path: Path, settings: RunConfig) -> dict[str, Any]:
    """Loads the checkpoint that training is to continue from.

    Args:
        path: A checkpoint or a run directory.
        settings: Of the run that continues.

    Raises:
        ValueError: It is of another model or scene.
        FileNotFoundError: It is not there.
    """
    checkpoint = load_checkpoint(resolve_checkpoint(path))
    saved = checkpoint["config"]
    if parse(Recipe, saved["model"], "model of the checkpoint") != settings.model:
        raise ValueError(
            f"resume must name a checkpoint of the configured model {asdict(settings.model)}, "
            f"got one of {saved['model']}"
        )
    if saved["scene"]["name"] != settings.scene.name:
        raise ValueError(
            f"resume must name a checkpoint of scene={settings.scene.name}, got one of scene={saved['scene']['name']}"
        )
    return checkpoint


def load_configured_scene(settings: RunConfig, root: Path, splits: Sequence[str] = ("train", "test")) -> Scene:
    """Loads the configured scene, downloading it first if ``data.download`` is set.

    Args:
        settings: Of the run.
        root: Folder that a relative ``data.root`` starts from.
        splits: Which splits to read.
    """
    scene = load_scene(
        settings.scene.name,
        splits=splits,
        image_size=settings.trainer.image_size,
        downscale=settings.data.downscale,
        holdout=settings.data.holdout,
        missing_images=settings.data.missing_images,
        lens_distortion=settings.data.lens_distortion,
        aabb=settings.scene.aabb,
        boxes=settings.scene.boxes,
        near=settings.scene.near,
        root=root / settings.data.root,
        download=settings.data.download,
    )
    if scene.boxes is None:
        return scene
    return replace(scene, boxes=replace(scene.boxes, ratio=settings.scene.box_ratio))


def build_logger(config: LoggerConfig, run_directory: Path, first_step: int) -> RunLogger:
    """Returns the configured logger; what an interrupted run logged from ``first_step`` on is superseded."""
    if config.name == "none":
        return NullLogger()
    return TensorBoardLogger(run_directory, purge_step=first_step if first_step > 0 else None)


def finish(session: Session, run_directory: Path, timing: Timing) -> dict[str, Any]:
    """Evaluates the test split; writes pictures, metrics, the model file and the orbit video, in this order.

    Returns the metrics.
    """
    config, device = session.config.trainer, session.device
    wish = config.evaluation
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    trained = session.result()
    logger.info("evaluating, with views drawn by %s", trained.backend)
    # A capture of which no view is held out has no others to judge by.
    judged = "test" if "test" in session.scene.splits else "train"
    images = run_directory / judged if wish.save_images else None
    evaluation = trained.evaluate(session.scene.split(judged), views=wish.views, images=images)
    metrics = describe(session, evaluation)
    metrics["split"] = judged
    metrics["drawn_by"] = trained.backend
    if peak is not None:
        metrics["peak_gpu_gib"] = peak
    timing.end("evaluate")
    metrics["seconds"] = timing.seconds()
    write_metrics(run_directory / "metrics.json", metrics)
    write_table(run_directory / "per_view.csv", evaluation)
    logger.info("%s over %d %s views", evaluation, len(evaluation.names), judged)
    cameras = session.scene.train.cameras
    if config.model_file != "none":
        shown = cameras if config.model_file == "small" else None
        trained.save(run_directory / MODEL_FILE, quality=config.model_file, cameras=shown)
    if wish.video_frames > 0:
        around = orbit(cameras, session.field.aabb.mean(dim=0).cpu(), wish.video_frames)
        write_video(run_directory / "orbit.mp4", video_frames(trained.render_path(around)))
    return metrics


def describe(session: Session, evaluation: Evaluation) -> dict[str, Any]:
    """Returns the content of ``metrics.json``."""
    device = session.device
    return {
        "scene": session.scene.name,
        **evaluation.means(),
        "views": len(evaluation.names),
        "train_seconds": session.train_seconds,
        "steps": session.step,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "resolution": list(session.field.grid.resolution),
        "psnr_per_view": dict(zip(evaluation.names, evaluation.psnr_per_view, strict=True)),
        "ssim_per_view": dict(zip(evaluation.names, evaluation.ssim_per_view, strict=True)),
        "per_view": evaluation.per_view(),
    }
