"""A run with regions: divides the capture, has each region trained as a run of its own, and evaluates them as one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from voxelfield.datasets.scene import Scene
from voxelfield.evaluation.evaluation import write_metrics, write_table
from voxelfield.loading import load
from voxelfield.regions.division import FILE, REGIONS, Division, divide
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.runs.configured import load_configured_scene
from voxelfield.runs.results import Timing, evaluated_split, quality
from voxelfield.training.config import RunConfig
from voxelfield.training.config.run import AUTO
from voxelfield.training.state.finished import recorded_settings
from voxelfield.training.state.run_directory import METRICS, PER_VIEW, RunDirectoryLock

logger = logging.getLogger(__name__)


def train_divided(
    settings: RunConfig, run_directory: Path, root: Path, train: Callable[[Division], bool]
) -> dict[str, Any] | None:
    """Trains and evaluates a configuration with several regions.

    Args:
        settings: All settings of the run.
        run_directory: Folder for the record of the regions, their runs and the results.
        root: Base folder of relative paths in the settings.
        train: Trains the regions into the folders ``regions/0``, ``regions/1``, ... of the directory; returns False if
            a signal has stopped it.

    Returns:
        The content of ``metrics.json``, or None if training was interrupted.

    Raises:
        ValueError: The capture cannot be divided, the directory holds other regions, or a region could not be trained.
        FileNotFoundError: The scene does not exist.
        OSError: A result cannot be written.
    """
    with RunDirectoryLock.acquire(run_directory) as lock:
        timing = Timing()
        scene = _scene_to_evaluate(settings, root)
        if scene.bounded:
            raise ValueError(
                f"regions must be 1 for {scene.name}, an object that ends at its box, got {settings.regions}: regions "
                "are for photographs of a place"
            )
        # Once each: Scene.poses has six for a panorama.
        c2w = scene.poses() if scene.all_cameras is None else scene.all_cameras.c2w
        division = divide(c2w, settings.regions, settings.region_overlap)
        if (run_directory / FILE).is_file() and (settings.resume != AUTO or Division.read(run_directory) != division):
            raise ValueError(
                f"hydra.run.dir must be a new one, or that of the same regions with resume=auto, got {run_directory}"
            )
        lock.created = False
        division.write(run_directory)
        timing.end("load")
        if not train(division):
            return None
        timing.end("train")
        return _evaluate(settings, run_directory, scene, timing)


def _scene_to_evaluate(settings: RunConfig, root: Path) -> Scene:
    """Loads the views to evaluate alone: all training images of a large capture need not fit in memory."""
    scene = load_configured_scene(settings, root, ("test",))
    return scene if scene.splits else load_configured_scene(settings, root, ("train",))


def _evaluate(settings: RunConfig, directory: Path, scene: Scene, timing: Timing) -> dict[str, Any]:
    trained, (name, split) = load(directory, settings.device), evaluated_split(scene)
    options = settings.trainer.evaluation
    thumbnails = Thumbnails(len(split) if options.views is None else min(options.views, len(split)))
    evaluation = trained.evaluate(
        split,
        views=options.views,
        images=directory / name if options.save_images else None,
        lpips=options.lpips,
        on_view=thumbnails.add,
    )
    timing.end("evaluate")
    logger.info("%s over %d %s views", evaluation, len(evaluation.names), name)
    regions = [
        json.loads((directory / REGIONS / str(number) / METRICS).read_text()) for number in range(len(trained.parts))
    ]
    metrics = {
        "scene": scene.name,
        **quality(trained, name, split, evaluation),
        **({"diverged": True} if any(region.get("diverged", False) for region in regions) else {}),
        "train_seconds": sum(region["train_seconds"] for region in regions),
        "train_views": sum(region["train_views"] for region in regions),
        "steps": trained.steps,
        "settings": recorded_settings(settings),
        "seconds": timing.seconds,
    }
    write_metrics(directory / METRICS, metrics)
    write_table(directory / PER_VIEW, evaluation)
    if options.report:
        # Imported here, because it takes a while.
        from voxelfield.report.page import write_report

        logger.info("the report is in %s", write_report(directory, metrics, trained.config, thumbnails))
    return metrics
