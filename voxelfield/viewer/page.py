"""The page: its panels and its server."""

from __future__ import annotations

import functools
import logging
import math
import shlex
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from voxelfield.captures.capture import thumbnail
from voxelfield.components.refinement import RefinedCameras
from voxelfield.datasets.camera_path import camera_path_file
from voxelfield.datasets.scene import Scene, Split
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import overview, reference_camera, through, upright_axes
from voxelfield.rendering.pixels import to_uint8
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.viewer.address import Address
from voxelfield.viewer.pictures import (
    MODES,
    PictureRequest,
    RenderWorker,
    Viewpoint,
    content_box,
    viewpoint_of,
    viewpoint_of_camera,
    wxyz_of,
)

logger = logging.getLogger(__name__)

Photographs: TypeAlias = Mapping[str, tuple[Split, int]]
"""Photographs by name, such as ``train/r_0``: each is the image of a split at an index."""

PATH_FILE = "camera_path.json"

MOST_KEYS = 500  # key cameras of a path
MOST_FRAMES = 36_000  # of a path: ten minutes at 60 frames per second
MOST_WAITING = 32  # uses of controls that wait for their turn; further ones are ignored
_SECONDS_BETWEEN_FILES = 1.0
_SECONDS_BETWEEN_STATUS = 0.5

_KEYS = """
- **drag** to orbit, **right-drag** to move sideways, **scroll** to come closer
- **W A S D** to fly level, **Q** and **E** down and up, **arrow keys** to turn
"""
_EMPTY = "Only the background is visible: the field is empty, or the camera looks elsewhere."

_OVERVIEW_SIZE = 512
_THUMBNAIL_SIDE = 96
_SPLIT_COLORS = {"train": (40, 110, 220), "test": (220, 120, 30)}
_OTHER_COLOR = (120, 120, 120)

_PATH_COLOR = (220, 50, 90)
_LINE_POINTS_PER_SPAN = 24

_BRAND_COLOR = (47, 111, 220)
_JPEG_MOVING, _JPEG_AT_REST = 80, 95

# Desired frames per second at which pictures are usually still legible.
_RATE_CPU, _RATE_CUDA = 6, 60


def photographs_of(scene: Scene, splits: Iterable[str], refined: RefinedCameras | None) -> Photographs:
    """Returns the photographs of those of the named splits that a scene has, with cameras that follow refined ones."""
    found = {name: scene.splits[name] for name in splits if name in scene.splits}
    if refined is not None:
        found = {name: refined.follow_split(split) for name, split in found.items()}
    return {f"{name}/{view}": (split, index) for name, split in found.items() for index, view in enumerate(split.names)}


def first_view(run: TrainedModel, photographs: Photographs) -> tuple[Viewpoint, Tensor]:
    """Returns the initial viewpoint, and the direction (3,) that points up, on the CPU.

    The viewpoint is the first photograph's, or else the reference camera's, or else obliquely above the box.
    """
    size = (_OVERVIEW_SIZE, _OVERVIEW_SIZE)
    cameras, index = reference_camera(run.model.warp, *size), 0
    if photographs:
        split, index = next(iter(photographs.values()))
        cameras = split.cameras
    if cameras is None:
        return viewpoint_of(overview(content_box(run), *size), 0), torch.tensor([0.0, 0.0, 1.0])
    return viewpoint_of(cameras, index), upright_axes(cameras)[2].float().cpu()


class ViewerPage:
    """Serves a page for exploring a field.

    Args:
        address: Where to serve it, as checked by :meth:`Address.check`.
        run: The field, or its state at the beginning of the training in progress.
        name: The run's path for the command line.
        photographs: Photographs of the scene, in the frame in which the field was trained; there may be none.
        poll: Returns the field if training has changed it since the last call; None if it does not change.
        progress: Returns the progress of training, in Markdown.

    Attributes:
        box: (2, 3) the part of space that matters, world units, on the CPU.
        extent: Its diagonal, world units.
        background: Colour behind the scene, three numbers from 0 to 255.
        home: The initial viewpoint.
        closed: Whether :meth:`close` has been called.

    Raises:
        ValueError: The port has just been taken by another program.
        MissingPackageError: The installed version of viser bypasses the checks.
    """

    def __init__(
        self,
        address: Address,
        run: TrainedModel,
        name: str,
        photographs: Photographs,
        poll: Callable[[], TrainedModel | None] | None = None,
        progress: Callable[[], str] = str,
    ) -> None:
        # Its import needs viser.
        from voxelfield.viewer.server import start_server

        self.address = address
        self.box = content_box(run)
        self.extent = float((self.box[1] - self.box[0]).norm())
        self.background = tuple(to_uint8(run.model.background).tolist())
        self.origin = run.config.scene.origin
        self.home, up = first_view(run, photographs)
        self.closed = False
        self._lock = threading.RLock()
        self._free_threads = threading.Semaphore(MOST_WAITING)
        self._threads = ThreadPoolExecutor(MOST_WAITING, "viewer")
        self.server = start_server(address, f"voxelfield: {run.config.scene.name}")
        device = run.model.device
        rate = _RATE_CUDA if device.type == "cuda" else _RATE_CPU
        # A field that does not change is returned once.
        self.worker = RenderWorker(device, self._deliver, rate, poll or functools.partial(next, iter([run]), None))
        gui, camera = self.server.gui, self.server.initial_camera
        gui.configure_theme(control_width="medium", show_logo=False, show_share_button=False, brand_color=_BRAND_COLOR)
        self.server.scene.set_up_direction(up.tolist())
        self._place(camera, self.home)
        camera.near, camera.far = 1e-3 * self.extent, 1e3 * self.extent
        tabs = gui.add_tab_group()
        with self._lock:  # callbacks wait until the page is complete
            with tabs.add_tab("View", icon="eye"):
                self.view = ViewPanel(self, rate, progress)
            self.cameras: CamerasPanel | None = None
            if photographs:
                with tabs.add_tab("Cameras", icon="camera"):
                    self.cameras = CamerasPanel(self, photographs)
            with tabs.add_tab("Path", icon="route"):
                self.path = PathPanel(self, name)
        self.server.on_client_connect(self._connect)
        self.server.on_client_disconnect(self._disconnect)

    def close(self) -> None:
        """Stops serving."""
        from voxelfield.viewer.server import stop_server

        self.closed = True
        self.worker.close()
        stop_server(self.server)

    def callback(self, work: Callable[[Any], None], lock: Any = None) -> Callable[[Any], Coroutine[Any, Any, None]]:
        """Returns a callback for a control; it calls ``work`` in a thread unless too many wait or the page is closed.

        ``work`` gets viser's handle of the client, or None if the value was set here; a ValueError is shown to the
        client. Callbacks run one at a time, because they share the page, unless long work, for which other controls
        need not wait, has a lock of its own.
        """

        def run(client: Any) -> None:
            try:
                with lock or self._lock:
                    if not self.closed:  # the program ends only after these threads
                        work(client)
            except Exception as error:
                if client is not None and isinstance(error, ValueError):
                    client.add_notification("This is not possible", str(error), color="red")
                else:
                    logger.error("viewer: a browser's request failed: %s: %s", type(error).__name__, error)
            finally:
                self._free_threads.release()

        async def call(event: Any) -> None:
            if self._free_threads.acquire(blocking=False):
                self._threads.submit(run, event.client)

        return call

    def _place(self, camera: Any, viewpoint: Viewpoint) -> None:
        c2w = viewpoint.matrix.double()
        position, ahead = c2w[:3, 3].numpy(), -c2w[:3, 2]
        # Dragging rotates the camera about the point that it looks at.
        distance = max(float(ahead @ (self.box.double().mean(dim=0) - c2w[:3, 3])), 0.1 * self.extent)
        camera.position = position
        camera.look_at = position + distance * ahead.numpy()
        camera.fov = viewpoint.fov

    def move(self, client: Any, viewpoint: Viewpoint) -> None:
        """Moves the camera of a client."""
        with client.atomic():
            self._place(client.camera, viewpoint)
            client.camera.wxyz = wxyz_of(viewpoint.matrix)
        client.flush()

    def add_frustum(
        self, name: str, viewpoint: Viewpoint, aspect: float, on_click: Callable[[Any], None], **options: Any
    ) -> Any:
        """Draws a camera; returns viser's handle."""
        c2w = viewpoint.matrix
        options |= {"wxyz": wxyz_of(c2w), "position": c2w[:3, 3].numpy(), "thickness": 1.5, "thickness_units": "screen"}
        frustum = self.server.scene.add_camera_frustum(name, viewpoint.fov, aspect, **options)
        frustum.on_click(self.callback(on_click))
        return frustum

    def request(self, client: Any) -> None:
        """Requests the picture for the camera of a client."""
        camera = client.camera
        height = min(camera.image_height, self.view.rows.value)
        width = max(1, round(height * camera.image_width / camera.image_height))
        request = PictureRequest(viewpoint_of_camera(camera), self.view.mode.value, height, width)
        self.worker.request(client.client_id, request)

    # Coroutines run where messages arrive, without waiting for a thread of viser's pool.
    async def _connect(self, client: Any) -> None:
        async def moved(_: Any) -> None:
            self.request(client)
            if self.cameras is not None:
                self.cameras.update_visibility()

        client.camera.on_update(moved)
        self.request(client)

    async def _disconnect(self, client: Any) -> None:
        self.worker.disconnect(client.client_id)

    def _deliver(self, client_id: int, pixels: Tensor, sharp: bool, seconds: float) -> None:
        client = self.server.get_clients().get(client_id)
        if client is None:
            self.worker.disconnect(client_id)
            return
        quality = _JPEG_AT_REST if sharp else _JPEG_MOVING
        client.scene.set_background_image(pixels.numpy(), format="jpeg", jpeg_quality=quality)
        # Otherwise viser would send it up to a sixtieth of a second later.
        client.flush()
        self.view.show_status(pixels, sharp, seconds)


class ViewPanel:
    """Displayed quantity, resolution, and the way back; ``rate`` is the initial number of frames per second."""

    def __init__(self, page: ViewerPage, rate: int, progress: Callable[[], str]) -> None:
        self._page = page
        self._progress = progress
        self._status_shown = 0.0
        gui = page.server.gui
        self.mode = gui.add_dropdown("Show", MODES, hint="Depth is blue near, red far away.")
        rest, moving = "Picture height while the camera rests.", "While the camera moves, pictures are smaller."
        self.rows = gui.add_slider("Rows at rest", 100, 2160, 20, 800, hint=rest)
        self.rate = gui.add_slider("Moving, frames/s", 1, 120, 1, rate, hint=moving)
        self.status = gui.add_markdown("Waiting for the first picture.")
        self.home = gui.add_button("Home", icon="home", hint="Returns to the initial view.")
        with gui.add_folder("Keys", expand_by_default=False, order=1e6):
            gui.add_markdown(_KEYS)
        for control in (self.mode, self.rows, self.rate):
            control.on_update(page.callback(lambda _: self._change()))
        self.home.on_click(page.callback(lambda client: page.move(client, page.home)))

    def show_status(self, pixels: Tensor, sharp: bool, seconds: float) -> None:
        """Shows the size and the drawing time of a sharp picture (H, W, 3), and now and then of others."""
        now = time.perf_counter()
        if not sharp and now - self._status_shown < _SECONDS_BETWEEN_STATUS:
            return
        self._status_shown = now
        height, width = pixels.shape[:2]
        status = f"{width} x {height} in {1000 * seconds:.0f} ms ({'at rest' if sharp else 'moving'})"
        if sharp and bool((pixels == pixels[0, 0]).all()):
            status += f"\n\n**{_EMPTY}**"
        self.status.content = f"{status}\n\n{self._progress()}".rstrip()

    def _change(self) -> None:
        self._page.worker.frames_per_second = float(self.rate.value)
        for client in self._page.server.get_clients().values():
            self._page.request(client)


class CamerasPanel:
    """Frusta with photographs, of which there is at least one, and moving to one."""

    def __init__(self, page: ViewerPage, photographs: Photographs) -> None:
        self._page = page
        self.photographs = photographs
        # Of many cameras around a scene, neighbours do not overlap.
        self._scale = page.extent * min(0.04, 0.6 / math.sqrt(len(photographs)))
        gui = page.server.gui
        self.shown = gui.add_checkbox("Show cameras", False, hint="Click one to go there.")
        self.view = gui.add_dropdown("Go to", tuple(photographs))
        self.frusta: list[Any] = []
        # Reading all photographs takes long, but must happen only once.
        self.shown.on_update(page.callback(lambda _: self._show(), threading.RLock()))
        self.view.on_update(page.callback(self._move))

    def update_visibility(self) -> None:
        """Hides frusta around a browser's camera, which would cover its picture."""
        cameras = [client.camera.position for client in self._page.server.get_clients().values()]
        for frustum in self.frusta:
            near = any(float(np.linalg.norm(frustum.position - camera)) < 1.5 * self._scale for camera in cameras)
            visible = self.shown.value and not near
            if frustum.visible != visible:
                frustum.visible = visible

    def _show(self) -> None:
        if self.shown.value and not self.frusta:
            photographs = self.photographs.items()
            self.frusta = [self._frustum(name, *each) for name, each in photographs if not self._page.closed]
        self.update_visibility()

    def _frustum(self, name: str, split: Split, index: int) -> Any:
        def select(client: Any) -> None:
            self.view.value = name
            self._move(client)

        width, height = split.cameras.size(index)
        image = Image.fromarray(split.image(index).numpy())
        return self._page.add_frustum(
            f"/cameras/{name}",
            viewpoint_of(split.cameras, index),
            width / height,
            select,
            scale=self._scale,
            color=_SPLIT_COLORS.get(name.partition("/")[0], _OTHER_COLOR),
            image=np.asarray(thumbnail(image, _THUMBNAIL_SIDE, self._page.background)),
            format="jpeg",
            visible=False,
        )

    def _move(self, client: Any) -> None:
        if client is not None:  # otherwise the value was set by a click at a frustum
            split, index = self.photographs[self.view.value]
            self._page.move(client, viewpoint_of(split.cameras, index, aspect=client.camera.aspect))


class PathPanel:
    """Key cameras, and the file of the path through them; ``run`` is the run's path for the command line."""

    def __init__(self, page: ViewerPage, run: str) -> None:
        self._page = page
        self._drawn: list[Any] = []
        self._next_file = 0.0
        gui = page.server.gui
        self.count = gui.add_markdown("")
        self.add = gui.add_button("Add key camera", icon="plus", hint="At the current camera pose.")
        self.edit = gui.add_button_group("", ("Remove last", "Clear"))
        self.seconds = gui.add_number("Seconds", 6.0, min=0.1, max=3600.0, step=0.1)
        self.fps = gui.add_number("Frames/s", 30, min=1, max=240, step=1)
        self.size = gui.add_vector2("Size", (1920, 1080), min=(16, 16), max=(8192, 8192), step=2)
        self.export = gui.add_button(f"Save {PATH_FILE}", icon="download")
        # A text field, because Markdown would interpret the name of the run.
        command = f"voxelfield render {shlex.quote(run)} --path {PATH_FILE}"
        self.command = gui.add_text("Video", command, disabled=True, hint="Renders the video of a saved path.")
        self.add.on_click(page.callback(lambda client: self.change([*self.keys, viewpoint_of_camera(client.camera)])))
        self.edit.on_click(page.callback(lambda _: self.change([] if self.edit.value == "Clear" else self.keys[:-1])))
        self.export.on_click(page.callback(self._save))
        self.change([])

    def path(self, frames: int) -> Cameras:
        """Returns cameras on a smooth path through the key cameras, of which there is at least one."""
        width, height = (round(side) for side in self.size.value)
        keys = [key.cameras(height, width) for key in self.keys]
        c2w, intrinsics = torch.cat([key.c2w for key in keys]), torch.cat([key.intrinsics for key in keys])
        return through(Cameras(c2w, intrinsics, width, height), frames)

    def change(self, keys: list[Viewpoint]) -> None:
        """Sets the key cameras, and shows the path and their number."""
        if len(keys) > MOST_KEYS:
            raise ValueError(f"a path has at most {MOST_KEYS} key cameras")
        self.keys, count = keys, len(keys)
        self.count.content = f"{count} key camera{'' if count == 1 else 's'}"
        self.export.disabled = count == 0
        for handle in self._drawn:
            handle.remove()
        self._drawn = [self._frustum(number, key) for number, key in enumerate(self.keys)]
        if count > 1:
            points = self.path(_LINE_POINTS_PER_SPAN * (count - 1) + 1).c2w[:, :3, 3].numpy()
            line = {"colors": _PATH_COLOR, "thickness": 2.0, "thickness_units": "screen"}
            segments = np.asarray(list(pairwise(points)))
            self._drawn.append(self._page.server.scene.add_line_segments("/path/line", points=segments, **line))

    def _frustum(self, number: int, key: Viewpoint) -> Any:
        width, height = self.size.value
        move, scale = functools.partial(self._page.move, viewpoint=key), 0.05 * self._page.extent
        return self._page.add_frustum(f"/path/{number}", key, width / height, move, scale=scale, color=_PATH_COLOR)

    def _save(self, client: Any) -> None:
        seconds, fps = float(self.seconds.value), int(self.fps.value)
        frames = max(1, round(seconds * fps))
        if frames > MOST_FRAMES:
            raise ValueError(f"seconds times fps must be at most {MOST_FRAMES} frames, got {seconds:g} x {fps}")
        # A browser that does not read would make files pile up here.
        if time.monotonic() < self._next_file:
            raise ValueError("a path can be saved once per second")
        content = camera_path_file(self.path(frames), fps, self._page.origin)
        self._next_file = time.monotonic() + _SECONDS_BETWEEN_FILES
        client.send_file_download(PATH_FILE, content, save_immediately=True)
