"""The photographs that a trained run is timed and judged on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import voxelfield
from voxelfield.config.parsing import parse
from voxelfield.datasets.scene import Scene
from voxelfield.training.config.run import DataConfig
from voxelfield.training.run import Run


def load_run_scene(
    run: Run, split: str, data_root: Path | None, missing_images: Literal["error", "skip"] | None = None
) -> Scene:
    """Loads a split of a run's scene at the full resolution of its images, whatever the run was trained at.

    Args:
        run: Its configuration names the scene.
        split: Name of the split, the only one that is loaded.
        data_root: Folder of scenes; None takes ``data.root`` of the run.
        missing_images: As for :func:`voxelfield.load_scene`; None takes ``data.missing_images`` of the run.

    Returns:
        The scene, on the CPU.

    Raises:
        FileNotFoundError: The scene or a file of it is not there.
        ValueError: A file of the scene is damaged.
    """
    scene, data = run.config.scene, parse(DataConfig, run.config.data, "data")
    return voxelfield.load_scene(
        scene.name,
        splits=(split,),
        holdout=data.holdout,
        missing_images=missing_images or data.missing_images,
        aabb=scene.aabb,
        root=data_root or data.root,
    )
