"""The photographs with which a trained run is timed and evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import voxelfield
from voxelfield.datasets.scene import Scene
from voxelfield.trained.trained_model import TrainedModel


def load_run_scene(
    run: TrainedModel, split: str, data_root: Path | None, missing_images: Literal["error", "skip"] | None = None
) -> Scene:
    """Loads a split of a run's scene at the full resolution of its images, regardless of the training resolution.

    Args:
        run: The run, whose configuration names the scene.
        split: Name of the split, the only one that is loaded.
        data_root: Folder of scenes; None for the run's ``data.root``.
        missing_images: As for :func:`voxelfield.load_scene`; None for the run's ``data.missing_images``.

    Returns:
        The scene, on the CPU.

    Raises:
        FileNotFoundError: The scene or one of its files does not exist.
        ValueError: A file of the scene is damaged.
    """
    data = run.config.data
    missing = missing_images or data.missing_images
    options = run.config.load_options(splits=(split,), image_size=None, downscale=1, missing_images=missing)
    return voxelfield.load_scene(run.config.scene.name, root=data_root or data.root, **options)
