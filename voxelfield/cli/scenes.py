"""What several verbs ask for: a trained run and a split of its scene."""

from __future__ import annotations

import argparse
from pathlib import Path

import voxelfield
from voxelfield.config.parsing import parse
from voxelfield.datasets.loading import load_scene
from voxelfield.datasets.scene import Split
from voxelfield.training.config.run import DataConfig, SceneConfig
from voxelfield.training.run import Run


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds RUN and where its scene is."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory, a checkpoint or a model file")
    parser.add_argument("--data-root", type=Path, help="folder of scenes (default: data.root of the run)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument(
        "--missing-images", choices=("error", "skip"), help="what to do about absent images (default: as the run did)"
    )


def load_run_and_split(
    options: argparse.Namespace, split: str, *, downscale: int | None = None, holdout: int | None = None
) -> tuple[Run, Split]:
    """Loads what :func:`add_run_arguments` asked for.

    Args:
        options: The parsed command line.
        split: Name of the scene's split.
        downscale: Images are shrunk by this factor; None: to the size that the run was trained at.
        holdout: As ``data.holdout``; None: as the run has it.

    Raises:
        FileNotFoundError: The run or the scene is not there.
        ValueError: One of them is damaged, or there is no such split.
    """
    run = voxelfield.load(options.run, options.device)
    data = parse(DataConfig, run.config.data, "data")
    known = parse(SceneConfig, run.config.scene, "scene")
    scene = load_scene(
        known.name,
        splits=(split,),
        image_size=run.trainer.image_size if downscale is None else None,
        downscale=data.downscale if downscale is None else downscale,
        holdout=data.holdout if holdout is None else holdout,
        missing_images=options.missing_images or data.missing_images,
        lens_distortion=data.lens_distortion,
        aabb=known.aabb,
        boxes=known.boxes,
        near=known.near,
        root=options.data_root or data.root,
    )
    return run, scene.split(split)
