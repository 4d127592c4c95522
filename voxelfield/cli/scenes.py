"""Command-line arguments shared by several verbs: a trained run and a split of its scene."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import voxelfield
from voxelfield.datasets.loading import find_scene, load_scene
from voxelfield.datasets.scene import Scene, Split
from voxelfield.training.trained_model import TrainedModel


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds RUN and where its scene is."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, a checkpoint or a model file")
    parser.add_argument("--data-root", type=Path, help="folder of scenes (default: data.root of the run)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument(
        "--missing-images", choices=("error", "skip"), help="how to handle missing images (default: as in the run)"
    )


def load_run_and_split(
    options: argparse.Namespace, split: str, *, downscale: int | None = None, holdout: int | None = None
) -> tuple[TrainedModel, Split]:
    """Loads the run and the split given by the options of :func:`add_run_arguments`.

    Args:
        options: The parsed command line.
        split: Name of the scene's split.
        downscale: Images are shrunk by this factor; None: to the size that the run was trained at.
        holdout: Overrides ``data.holdout``; None: the run's value.
    """
    run = voxelfield.load(options.run, options.device)
    scene = load_scene_of(run, options, (split,), downscale=downscale, holdout=holdout)
    if split not in scene.splits:
        raise ValueError(f"the split must be train for a scene of which no views are held out, got {split}")
    return run, scene.split(split)


def load_scene_of(
    run: TrainedModel,
    options: argparse.Namespace,
    splits: Sequence[str] | None,
    *,
    downscale: int | None = None,
    holdout: int | None = None,
) -> Scene:
    """Loads splits of the scene of a run; ``splits=None`` loads all. The options are as for :func:`load_run_and_split`.

    Raises:
        FileNotFoundError: The scene is not there.
        ValueError: It is damaged, or there is no such split.
    """
    changes: dict[str, Any] = {"splits": splits}
    if downscale is not None:
        changes |= {"downscale": downscale, "image_size": None}
    if holdout is not None:
        changes["holdout"] = holdout
    if options.missing_images is not None:
        changes["missing_images"] = options.missing_images
    return load_scene(scene_folder(run, options), **run.config.load_options(**changes))


def scene_folder(run: TrainedModel, options: argparse.Namespace) -> Path:
    """Returns the folder that :func:`load_scene_of` loads from."""
    return find_scene(run.config.scene.name, options.data_root or run.config.data.root)
