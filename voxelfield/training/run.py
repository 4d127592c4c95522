"""One run from configuration to results: load, build, fit, evaluate, write."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from omegaconf import DictConfig, OmegaConf

from voxelfield import _library
from voxelfield.datasets.blender import downscale_to_fit, load_blender
from voxelfield.datasets.locate import find_scene
from voxelfield.datasets.scene import Scene, Split
from voxelfield.devices import choose_device
from voxelfield.export.model_file import MODEL_FILE, save_model
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.rendering.cameras import Cameras, orbit
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.training.checkpoint import load_checkpoint, resolve_checkpoint
from voxelfield.training.clock import synchronized_time
from voxelfield.training.config import (
    LoggerConfig,
    RunConfig,
    TrainerConfig,
    parse,
)
from voxelfield.training.evaluation import Evaluation, evaluate_split, write_metrics, write_video
from voxelfield.training.images import composite_background, to_uint8
from voxelfield.training.logging import NullLogger, RunLogger, TensorBoardLogger, comparison_panel, flatten_config
from voxelfield.training.memory import check_memory, estimate_memory
from voxelfield.training.metrics import psnr
from voxelfield.training.trained import TrainedRun
from voxelfield.training.trainer import Trainer

logger = logging.getLogger(__name__)


def run(config: DictConfig, run_directory: Path, root: Path) -> dict[str, Any] | None:
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
        FileNotFoundError: The scene or the checkpoint is not there.
    """
    settings = parse(RunConfig, config)
    trainer_config = settings.trainer
    device = choose_device(settings.device)
    # Kernels that cannot be had are to be missed now, not once the images are loaded.
    _library.ensure_loaded(device.type)
    checkpoint = None
    if settings.resume is not None:
        checkpoint = load_checkpoint(resolve_checkpoint(root / settings.resume))
        check_same_model(checkpoint["config"]["model"], settings.model)
        saved_scene = checkpoint["config"]["scene"]["name"]
        if saved_scene != settings.scene.name:
            raise ValueError(f"resume: the checkpoint is of scene={saved_scene}, not of scene={settings.scene.name}")
    with ThreadPoolExecutor(max_workers=1) as background:
        # The first optimizer that is built imports this, which takes seconds: here it does so while images are decoded.
        imported = background.submit(importlib.import_module, "torch._dynamo")
        scene = load_scene(settings, root)
        imported.result()
    if device.type == "cuda":
        # Told before anything is on the device, so that what is there already is not counted twice.
        shapes = settings.model.build(scene.aabb, trainer_config.resolutions, "meta")
        estimate = estimate_memory(shapes, settings.model, trainer_config, scene.train)
        logger.info("training needs about %s of GPU memory", estimate)
        check_memory(estimate, device)
    saved_config: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    first_step = 0 if checkpoint is None else checkpoint["step"]
    log = build_logger(settings.logger, run_directory, first_step)
    log.text("config", f"```yaml\n{OmegaConf.to_yaml(config, resolve=True)}```")
    torch.manual_seed(settings.seed)
    started = synchronized_time(device)
    field = settings.model.build(scene.aabb, trainer_config.resolutions, device)
    trainer = Trainer(
        field, settings.model, scene.train, trainer_config, settings.optimizer, log, run_directory, saved_config
    )
    trainer.train_seconds = synchronized_time(device) - started
    if checkpoint is not None:
        trainer.restore(checkpoint)
        logger.info("resumed at step %d", trainer.step)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    finished = trainer.fit(lambda step: preview(trainer, scene.test, log, step))
    if not finished:
        log.close()
        logger.warning("stopped after step %d; continue with resume=%s", trainer.step, run_directory)
        return None
    metrics = finish(trainer, scene, trainer_config, log, run_directory)
    final = {name: metrics[name] for name in ("psnr", "ssim", "train_seconds")}
    log.hyperparameters(flatten_config(saved_config), final)
    log.close()
    return metrics


def check_same_model(saved: dict[str, Any], model: Recipe) -> None:
    """Raises ValueError unless the model is the one of the checkpoint that training is to continue from."""
    if parse(Recipe, saved, "model of the checkpoint") != model:
        raise ValueError(f"resume: the checkpoint holds model {saved}, but the configuration says {asdict(model)}")


def load_scene(config: RunConfig, root: Path, splits: Sequence[str] = ("train", "test")) -> Scene:
    """Finds and loads the configured scene, downloading it first if ``data.download`` is set.

    Images are downscaled by the smallest whole factor that fits ``trainer.image_size``. Only ``splits`` are read.
    """
    image_size = config.trainer.image_size
    folder = find_scene(config.scene.name, root / config.data.root, download=config.data.download)
    scene = load_blender(
        folder,
        splits=splits,
        downscale=1 if image_size is None else downscale_to_fit(folder, image_size),
        missing_images=config.data.missing_images,
        aabb=config.scene.aabb,
    )
    for split_name, split in scene.splits.items():
        height, width = split.images.shape[1:3]
        logger.info("%s: %d %s views, %d x %d", scene.name, len(split), split_name, width, height)
    return scene


def build_logger(config: LoggerConfig, run_directory: Path, first_step: int) -> RunLogger:
    """Returns the configured logger; what an interrupted run logged from ``first_step`` on is superseded."""
    if config.name == "none":
        return NullLogger()
    return TensorBoardLogger(run_directory, purge_step=first_step if first_step > 0 else None)


def spread(count: int, total: int) -> list[int]:
    """Returns ``count`` indices spread evenly over ``range(total)``, or all of them if there are no more."""
    return [index * total // count for index in range(count)] if count < total else list(range(total))


def preview(trainer: Trainer, split: Split, log: RunLogger, step: int) -> None:
    """Logs render | truth | error | depth and the PSNR at fixed views."""
    scores = []
    renderer = trainer.renderer()
    for index in spread(trainer.config.preview_views, len(split)):
        view = renderer.view(split.cameras, index)
        truth = composite_background(split.images[index].to(trainer.device), trainer.background)
        scores.append(float(psnr(view.rgb.clamp(0, 1), truth)))
        panel = comparison_panel(view.rgb, truth, view.depth, view.opacity)
        log.images(step, f"test/{split.names[index]}", panel)
    mean = math.fsum(scores) / len(scores)
    log.scalars(step, {"test/psnr": mean})
    logger.info("step %d: PSNR %.2f dB over %d test views", step, mean, len(scores))


def finish(
    trainer: Trainer, scene: Scene, config: TrainerConfig, log: RunLogger, run_directory: Path
) -> dict[str, Any]:
    """Evaluates the test split; writes pictures, ``metrics.json``, the model file and the orbit video, in this order.

    Returns the metrics.
    """
    wish = config.evaluation
    test = scene.test
    views = spread(len(test) if wish.views is None else wish.views, len(test))
    peak = torch.cuda.max_memory_allocated(trainer.device) / 2**30 if trainer.device.type == "cuda" else None
    renderer = trainer.renderer()
    logger.info("evaluating %d of %d test views, drawn by %s", len(views), len(test), renderer.backend)
    evaluation = evaluate_split(
        renderer.view,
        test,
        trainer.background,
        run_directory / "test" if wish.save_images else None,
        views=views,
    )
    metrics = describe(trainer, scene, evaluation)
    metrics["drawn_by"] = renderer.backend
    if peak is not None:
        metrics["peak_gpu_gib"] = peak
    write_metrics(run_directory / "metrics.json", metrics)
    trained = TrainedRun(trainer.field, trainer.occupancy, config, OmegaConf.create(trainer.saved_config), trainer.step)
    if config.model_file != "none":
        cameras = scene.train.cameras if config.model_file == "small" else None
        save_model(run_directory / MODEL_FILE, trained, quality=config.model_file, cameras=cameras)
    logger.info("PSNR %.2f dB, SSIM %.4f over %d test views", evaluation.psnr, evaluation.ssim, len(views))
    if wish.video_frames > 0:
        around = orbit(scene.train.cameras, trainer.field.grid.aabb.mean(dim=0).cpu(), wish.video_frames)
        write_video(run_directory / "orbit.mp4", video_frames(renderer, around))
    return metrics


def describe(trainer: Trainer, scene: Scene, evaluation: Evaluation) -> dict[str, Any]:
    """Returns the content of ``metrics.json``."""
    device = trainer.device
    return {
        "scene": scene.name,
        "psnr": evaluation.psnr,
        "ssim": evaluation.ssim,
        "views": len(evaluation.names),
        "train_seconds": trainer.train_seconds,
        "steps": trainer.step,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "resolution": list(trainer.field.grid.resolution),
        "psnr_per_view": dict(zip(evaluation.names, evaluation.psnr_per_view, strict=True)),
        "ssim_per_view": dict(zip(evaluation.names, evaluation.ssim_per_view, strict=True)),
    }


def video_frames(renderer: FieldRenderer, cameras: Cameras) -> Iterator[npt.NDArray[np.uint8]]:
    """Renders one camera after another, frame by frame."""
    for index in range(len(cameras)):
        yield to_uint8(renderer.view(cameras, index).rgb).cpu().numpy()
