"""Command-line arguments shared by several verbs: a trained run, a split of its scene, and numbers in a range."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import voxelfield
from voxelfield.config import Range
from voxelfield.datasets.loading import find_scene, load_scene
from voxelfield.datasets.scene import Scene, Split
from voxelfield.messages import clipped
from voxelfield.trained.trained_model import TrainedModel


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds RUN and where its scene is."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, a checkpoint or a model file")
    parser.add_argument("--data-root", type=Path, help="folder of scenes (default: data.root of the run)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument(
        "--missing-images", choices=("error", "skip"), help="how to handle missing images (default: as in the run)"
    )


def number(kind: type[int] | type[float], allowed: Range) -> Callable[[str], float]:
    """Returns an argument type: a number in a range."""

    def convert(text: str) -> float:
        value = kind(text)
        if not allowed.contains(value):
            raise argparse.ArgumentTypeError(f"must {allowed}, got {clipped(text)}")
        return value

    convert.__name__ = kind.__name__  # argparse names it for text that is no number
    return convert


def load_run_and_split(options: argparse.Namespace, split: str, **changes: Any) -> tuple[TrainedModel, Split]:
    """Loads the run and the split given by the options of :func:`add_run_arguments`.

    Args:
        options: The parsed command line.
        split: Name of the scene's split.
        changes: As for :func:`load_scene_of`.
    """
    run = voxelfield.load(options.run, options.device)
    scene = load_scene_of(run, options, (split,), **changes)
    if split not in scene.splits:
        raise ValueError(f"the split must be train for a scene of which no views are held out, got {split}")
    return run, scene.split(split)


def load_scene_of(
    run: TrainedModel, options: argparse.Namespace, splits: Sequence[str] | None, **changes: Any
) -> Scene:
    """Loads splits of the scene of a run.

    Args:
        run: The run.
        options: The parsed command line, with the options of :func:`add_run_arguments`.
        splits: Names of the splits; None for all.
        changes: Options of :func:`voxelfield.load_scene` that replace those of the run, unless they are None. Images
            are shrunk either by ``downscale`` or to the size that the run was trained at.

    Raises:
        FileNotFoundError: The scene is not there.
        ValueError: It is damaged, or there is no such split.
    """
    given = changes | {"missing_images": options.missing_images}
    replaced = {name: value for name, value in given.items() if value is not None}
    if "downscale" in replaced:
        replaced["image_size"] = None
    return load_scene(scene_folder(run, options), **run.config.load_options(splits=splits, **replaced))


def scene_folder(run: TrainedModel, options: argparse.Namespace) -> Path:
    """Returns the folder that :func:`load_scene_of` loads from."""
    return find_scene(run.config.scene.name, options.data_root or run.config.data.root).folder
