"""Poses between viser's conventions and this package's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxelfield.viewer.drawing.viewpoint import Viewpoint


def viewpoint_of_camera(camera: Any) -> Viewpoint:
    """Returns where a viser camera looks from: its axes are x right, y down, z forward."""
    from viser import transforms

    c2w = torch.eye(4, dtype=torch.float64)
    c2w[:3, :3] = torch.from_numpy(transforms.SO3(np.asarray(camera.wxyz)).as_matrix())
    c2w[:3, 1:3] *= -1
    c2w[:3, 3] = torch.from_numpy(np.asarray(camera.position, dtype=np.float64))
    return Viewpoint.of(c2w, camera.fov)


def wxyz_of(c2w: Tensor) -> np.ndarray:
    """Returns the quaternion of viser's axes for a pose (4, 4) of this package's."""
    from viser import transforms

    rotation = c2w[:3, :3].double().clone()
    rotation[:, 1:] *= -1
    quaternion: np.ndarray = transforms.SO3.from_matrix(rotation.numpy()).wxyz
    return quaternion


def move_camera(client: Any, viewpoint: Viewpoint, distance: float) -> None:
    """Moves a viser client's camera.

    Args:
        client: viser's handle.
        viewpoint: Where to.
        distance: Distance ahead of the camera to the point that dragging rotates about, world units.
    """
    c2w = viewpoint.matrix.double()
    position = c2w[:3, 3].numpy()
    with client.atomic():
        client.camera.position = position
        client.camera.look_at = position - distance * c2w[:3, 2].numpy()
        client.camera.wxyz = wxyz_of(c2w)
        client.camera.fov = viewpoint.fov
    client.flush()
