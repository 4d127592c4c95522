"""Command-line arguments shared by several verbs: a trained run, a split of its scene, and numbers in a range."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import voxelfield
from voxelfield.config import Range
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
    """Loads splits of the scene of a run, see :meth:`voxelfield.trained.trained_model.TrainedModel.load_scene`.

    Args:
        run: The run.
        options: The parsed command line, with the options of :func:`add_run_arguments`.
        splits: Names of the splits; None for all.
        changes: Options of :func:`voxelfield.load_scene` that replace those of the run, unless they are None.
    """
    return run.load_scene(splits, root=options.data_root, missing_images=options.missing_images, **changes)
