"""The state of the page, which its panels share."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxelfield.grids.boxes import box_tensor
from voxelfield.rendering.cameras import overview, reference_camera, up_direction
from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.display import SMALLEST_SIDE, Viewpoint, viewpoint_of
from voxelfield.viewer.painter import content_box, crop_limits
from voxelfield.viewer.photographs import Photographs
from voxelfield.viewer.worker import PictureRequest, RenderWorker

logger = logging.getLogger(__name__)

DEFAULT_ROWS = 800

_OVERVIEW_SIZE = 512


class ViewerState:
    """The scene on the page, and the connected clients.

    Args:
        server: viser's server.
        worker: Draws pictures.
        run: The field, or its state at the beginning of a training.
        photographs: Photographs of the scene.

    Attributes:
        box: (2, 3) the part of space that matters, world units, on the CPU.
        extent: Diagonal of the box, world units.
        crop_limits: The largest crop box, world units.
        background: (3,) colour behind the scene, on the CPU.
        home: The initial viewpoint: the first photograph, the reference camera, or obliquely above the box.
        up: (3,) the direction that points up in the photographs.
        rows: Largest height of pictures at rest, pixels.
        photo_of: The photograph that each client has last gone to, by its number.
        closed: Whether the page is closed.
    """

    def __init__(self, server: Any, worker: RenderWorker, run: TrainedModel, photographs: Photographs) -> None:
        self.server = server
        self.worker = worker
        self.photographs = photographs
        self.box = box_tensor(content_box(run), torch.device("cpu"))
        self.extent = float((self.box[1] - self.box[0]).norm())
        self.crop_limits = crop_limits(run)
        self.background = run.model.background.cpu()
        cameras, index = reference_camera(run.model.warp, _OVERVIEW_SIZE, _OVERVIEW_SIZE), 0
        if len(photographs):
            cameras, index = photographs.camera(0)
        self.up = torch.tensor([0.0, 0.0, 1.0]) if cameras is None else up_direction(cameras).float().cpu()
        shown = overview(self.box, _OVERVIEW_SIZE, _OVERVIEW_SIZE) if cameras is None else cameras
        self.home = viewpoint_of(shown, index)
        self.rows = DEFAULT_ROWS
        self.photo_of: dict[int, int] = {}
        self.closed = False
        self._lock = threading.RLock()

    def callback(self, work: Callable[[Any], None], *, long: bool = False) -> Callable[[Any], None]:
        """Returns a callback for a control, which viser runs in a thread of its pool.

        Args:
            work: Called with viser's handle of the client, or None if the value was set here. A ValueError is shown to
                the client.
            long: Whether it takes long; other callbacks run one at a time, because they share the page.
        """

        def call(event: Any) -> None:
            try:
                with contextlib.nullcontext() if long else self._lock:
                    work(event.client)
            except Exception as error:
                if event.client is not None and isinstance(error, ValueError):
                    event.client.add_notification("This is not possible", str(error), color="red")
                else:
                    logger.error("viewer: a browser's request failed: %s: %s", type(error).__name__, error)

        return call

    def distance_ahead(self, viewpoint: Viewpoint) -> float:
        """Returns the distance from a camera to the point about which dragging rotates it, world units."""
        c2w = viewpoint.matrix
        ahead = float(-c2w[:3, 2] @ (self.box.mean(dim=0) - c2w[:3, 3]))
        return max(ahead, 0.1 * self.extent)

    def move(self, client: Any, viewpoint: Viewpoint) -> None:
        """Moves the camera of a client."""
        c2w = viewpoint.matrix.double()
        position = c2w[:3, 3].numpy()
        with client.atomic():
            client.camera.position = position
            client.camera.look_at = position - self.distance_ahead(viewpoint) * c2w[:3, 2].numpy()
            client.camera.wxyz = wxyz_of(c2w)
            client.camera.fov = viewpoint.fov
        client.flush()

    def go_to_photograph(self, client: Any, number: int) -> None:
        """Moves the camera of a client to the pose of a photograph, with all of it in view."""
        self.photo_of[client.client_id] = number
        self.move(client, viewpoint_of(*self.photographs.camera(number), aspect=client.camera.aspect))

    def request(self, client: Any) -> None:
        """Requests the picture for the camera of a client."""
        camera = client.camera
        viewpoint = viewpoint_of_camera(camera)
        height = min(camera.image_height, self.rows)
        width = max(SMALLEST_SIDE, round(height * camera.image_width / camera.image_height))
        photo = self.photo_of.get(client.client_id) if self.worker.display.photo_fraction > 0 else None
        if photo is not None and not self.photographs.is_taken_from(photo, viewpoint.matrix, self.extent):
            photo = None
        self.worker.request(client.client_id, PictureRequest(viewpoint, height, width, photo))

    def request_all(self) -> None:
        """Requests the pictures of all clients again, after a setting has changed that requests depend on."""
        for client in self.server.get_clients().values():
            self.request(client)

    def is_connected(self, client: Any) -> bool:
        """Returns whether a client is still connected; callbacks that take long end otherwise."""
        return not self.closed and client.client_id in self.server.get_clients()

    def disconnect(self, client: Any) -> None:
        """Forgets a client."""
        self.photo_of.pop(client.client_id, None)
        self.worker.disconnect(client.client_id)


def viewpoint_of_camera(camera: Any) -> Viewpoint:
    """Returns the viewpoint of a viser camera, whose axes are x right, y down, z forward."""
    from viser import transforms

    c2w = torch.eye(4, dtype=torch.float64)
    c2w[:3, :3] = torch.from_numpy(transforms.SO3(np.asarray(camera.wxyz)).as_matrix())
    c2w[:3, 1:3] *= -1
    c2w[:3, 3] = torch.from_numpy(np.asarray(camera.position, dtype=np.float64))
    return Viewpoint.of(c2w, camera.fov)


def wxyz_of(c2w: Tensor) -> np.ndarray:
    """Returns the quaternion of a pose (4, 4) in the axes of viser's cameras."""
    from viser import transforms

    rotation = c2w[:3, :3].double().clone()
    rotation[:, 1:] *= -1
    quaternion: np.ndarray = transforms.SO3.from_matrix(rotation.numpy()).wxyz
    return quaternion
