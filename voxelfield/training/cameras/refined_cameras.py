"""Refined training cameras, and the corresponding poses of other cameras of the scene."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from voxelfield.datasets.lenses import share_camera_model, transforms_camera
from voxelfield.datasets.scene import Split
from voxelfield.files import atomic_write
from voxelfield.rendering.alignment import Similarity, align_cameras, pose_errors
from voxelfield.rendering.cameras import Cameras

CAMERAS_FILE = "cameras.json"
"""Name of the file of refined cameras in a run's folder."""


@dataclass(frozen=True, eq=False)
class RefinedCameras:
    """The training cameras before and after their refinement.

    Attributes:
        given: N cameras as in the scene.
        refined: The N cameras in the field's world frame, which they define.
    """

    given: Cameras
    refined: Cameras

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RefinedCameras:
        """Returns the cameras of a checkpoint (:meth:`CameraRefinement.state`), on the CPU and without their lens."""
        module = state["module"]
        given = Cameras.of_sizes(module["given_c2w"].cpu(), module["given_intrinsics"].cpu(), state["sizes"].cpu())
        return cls(given, replace(given, c2w=state["c2w"].cpu(), intrinsics=state["intrinsics"].cpu()))

    @cached_property
    def similarity(self) -> Similarity:
        """The transform from the world frame of the given cameras to that of the refined ones."""
        return align_cameras(self.given, self.refined)

    def follow(self, cameras: Cameras) -> Cameras:
        """Moves cameras of the scene into the world frame of the field.

        Args:
            cameras: Cameras in the world frame of the given ones.

        Returns:
            The cameras, on their device. A camera whose pose equals that of a given one exactly gets its refined pose;
            all others are moved by :attr:`similarity`. All focal lengths change by the same factor.
        """
        moved = self.similarity.cameras(cameras)
        c2w = moved.c2w.clone()
        known = self.given.c2w.to(c2w.device).flatten(1)
        for index, pose in enumerate(cameras.c2w.flatten(1)):
            found = (known == pose).all(dim=1).nonzero()
            if len(found) > 0:
                c2w[index] = self.refined.c2w[int(found[0, 0])].to(c2w.device)
        intrinsics = cameras.intrinsics.clone()
        intrinsics[:, :2] *= self.focal_factor
        return replace(moved, c2w=c2w, intrinsics=intrinsics)

    def follow_split(self, split: Split) -> Split:
        """Returns a split of the scene with its cameras in the world frame of the field."""
        return replace(split, cameras=self.follow(split.cameras))

    def changes(self) -> dict[str, float]:
        """Returns the mean changes over the cameras, apart from :attr:`similarity`.

        They are ``turned_degrees``, ``moved`` in the field's world units, and ``focal_factor``.
        """
        turned, moved = pose_errors(self.given, self.refined, rotations=True)
        return {
            "turned_degrees": float(turned.mean()),
            "moved": float(moved.mean()),
            "focal_factor": self.focal_factor,
        }

    @property
    def focal_factor(self) -> float:
        """Factor by which all focal lengths were multiplied."""
        return float(self.refined.intrinsics[0, 0] / self.given.intrinsics[0, 0])


def write_cameras(path: Path, split: Split, cameras: Cameras) -> None:
    """Writes refined cameras in the format of nerfstudio's ``transforms.json``, atomically.

    Args:
        path: File to write.
        split: The images, whose file paths, or else names, are written.
        cameras: Their cameras.
    """
    names: Sequence[str] = split.names if split.paths is None else [str(path) for path in split.paths]
    cameras = cameras.to("cpu")
    frames = [
        {"file_path": name, **transforms_camera(cameras, index, cameras.size(index))}
        for index, name in enumerate(names)
    ]
    with atomic_write(path) as file:
        file.write((json.dumps(share_camera_model(frames), indent=1) + "\n").encode())
