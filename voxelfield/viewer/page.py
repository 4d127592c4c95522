"""The page: its panels and its server."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from voxelfield.captures.capture import thumbnail
from voxelfield.components.refinement import RefinedCameras
from voxelfield.datasets.camera_path import camera_path_file
from voxelfield.datasets.scene import Scene, Split
from voxelfield.installed import MissingPackageError
from voxelfield.media.video import write_video
from voxelfield.messages import in_shell
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import overview, reference_camera, through, upright_axes
from voxelfield.rendering.pixels import to_uint8, turbo
from voxelfield.rendering.view_pictures import PICTURES, depth_range, picture
from voxelfield.rendering.viewpoints import Viewpoint, turned, viewpoint_of, viewpoint_of_camera
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.viewer.address import Address
from voxelfield.viewer.pictures import PictureRequest, RenderWorker

logger = logging.getLogger(__name__)

Photographs: TypeAlias = Mapping[str, tuple[Split, int]]
"""Photographs by name, such as ``train/r_0``: each is the image of a split at an index."""

PATH_FILE = "camera_path.json"
VIDEO_FILE = "camera_path.mp4"

MOST_KEYS = 500  # key cameras of a path
MOST_FRAMES = 36_000  # of a path: ten minutes at 60 frames per second
MOST_WAITING = 32  # uses of controls that wait for their turn; further ones are ignored
_SECONDS_BETWEEN_FILES = 1.0
_SECONDS_BETWEEN_STATUS = 0.5

_KEYS = "Drag orbits, right-drag moves sideways, scroll comes closer; W A S D, Q and E fly, and the arrow keys turn."
_COLORS = "Frusta are blue for training photographs, orange for those of the test, and red for key cameras of the path."
_EMPTY = "Only the background is visible: the field is empty, or the camera looks elsewhere."

_OVERVIEW_SIZE = 512
_THUMBNAIL_SIDE = 96
_SPLIT_COLORS = {"train": (40, 110, 220), "test": (220, 120, 30), "val": (120, 120, 120)}

_PATH_COLOR = (220, 50, 90)
_ORBIT_KEYS = 12
_PLAYED_PER_SECOND = 30

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
        return viewpoint_of(overview(run.model.content_box, *size), 0), torch.tensor([0.0, 0.0, 1.0])
    return viewpoint_of(cameras, index), upright_axes(cameras)[2].float().cpu()


class ViewerPage:
    """Serves a page for exploring a field.

    Args:
        address: Where to serve it, as checked by :meth:`Address.check`.
        run: The field, or its state at the beginning of the training in progress.
        run_path: The path from which the field is loaded again, for the command line.
        photographs: Photographs of the scene, in the frame in which the field was trained; there may be none.
        poll: Returns the field if training has changed it since the last call; None if it does not change.

    Attributes:
        box: (2, 3) the part of space that matters, world units, on the CPU.
        extent: Its diagonal, world units.
        background: Colour behind the scene, three numbers from 0 to 255.
        home: The initial viewpoint.
        up: (3,) direction that points up, on the CPU.
        tabs: The group of tabs, to which a program may add.
        overlays: The node of the scene above all frusta and the path; hidden while a path is played.
        closed: Whether :meth:`close` has been called.

    Raises:
        ValueError: The port has just been taken by another program.
        MissingPackageError: The installed version of viser bypasses the checks.
    """

    def __init__(
        self,
        address: Address,
        run: TrainedModel,
        run_path: Path,
        photographs: Photographs,
        poll: Callable[[], TrainedModel | None] | None = None,
    ) -> None:
        # Its import needs viser.
        from voxelfield.viewer.server import start_server

        self.address = address
        self.box = run.model.content_box
        self.extent = float((self.box[1] - self.box[0]).norm())
        self.background = tuple(to_uint8(run.model.background).tolist())
        self.origin = run.config.scene.origin
        self.home, self.up = first_view(run, photographs)
        self.faces_forward = run.model.warp is not None and run.model.warp.is_forward_facing
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
        self.server.scene.set_up_direction(self.up.tolist())
        self._place(camera, self.home)
        self.overlays = self.server.scene.add_frame("/overlays", show_axes=False)
        camera.near, camera.far = 1e-3 * self.extent, 1e3 * self.extent
        self.tabs = gui.add_tab_group()
        with self._lock:  # callbacks wait until the page is complete
            with self.tabs.add_tab("View", icon="eye"):
                self.view = ViewPanel(self, rate)
            self.cameras: CamerasPanel | None = None
            if photographs:
                with self.tabs.add_tab("Cameras", icon="camera"):
                    self.cameras = CamerasPanel(self, photographs)
            with self.tabs.add_tab("Path", icon="route") as tab:
                self.path = PathPanel(self, tab, run_path)
            self.path.change([])
        self.view.fov.value = math.degrees(self.home.fov)
        self.server.on_client_connect(self._connect)
        self.server.on_client_disconnect(self._disconnect)

    def close(self) -> None:
        """Stops serving."""
        self.closed = True
        self.worker.close()
        with contextlib.redirect_stdout(None):  # viser prints a banner
            self.server.stop()

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
                if client is not None and isinstance(error, (ValueError, MissingPackageError)):
                    client.add_notification("Not done", str(error), color="red")
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
            client.camera.wxyz = viewpoint.wxyz
        client.flush()
        self.view.fov.value = math.degrees(viewpoint.fov)

    def add_frustum(
        self, name: str, viewpoint: Viewpoint, aspect: float, choice: Any, option: str, go: Any, **options: Any
    ) -> Any:
        """Draws a camera, where a click goes as choosing an option of a list does; returns viser's handle."""

        def select(client: Any) -> None:
            choice.value = option
            go(client)

        position = viewpoint.matrix[:3, 3].numpy()
        options |= {"wxyz": viewpoint.wxyz, "position": position, "thickness": 1.5, "thickness_units": "screen"}
        frustum = self.server.scene.add_camera_frustum(f"/overlays/{name}", viewpoint.fov, aspect, **options)
        frustum.on_click(self.callback(select))
        return frustum

    def serves(self, client: Any) -> bool:
        """Returns whether the page is open, and the client connected."""
        return not self.closed and client.client_id in self.server.get_clients()

    def update_visibility(self) -> None:
        """Hides frusta around a browser's camera, which would cover its picture."""
        cameras = [client.camera.position for client in self.server.get_clients().values()]
        for frustum in [*self.path.frusta, *(() if self.cameras is None else self.cameras.frusta)]:
            visible = all(float(np.linalg.norm(frustum.position - camera)) > 1.5 * frustum.scale for camera in cameras)
            if frustum.visible != visible:
                frustum.visible = visible

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
            self.update_visibility()

        if client.camera.aspect < 1:  # a phone held upright
            client.camera.fov = self.home.fitted(client.camera.aspect).fov
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

    def __init__(self, page: ViewerPage, rate: int) -> None:
        self._page = page
        self._status_shown = 0.0
        gui = page.server.gui
        self.mode = gui.add_dropdown("Show", PICTURES)
        colors = to_uint8(turbo(torch.linspace(0, 1, 256))).expand(12, -1, -1)
        self.colors = gui.add_image(colors.numpy(), label="Depth, from near to far in this picture", visible=False)
        self.fov = gui.add_slider("View angle", 1.0, 179.0, 0.5, 45.0, hint="Vertical field of view, degrees.")
        rest, moving = "Picture height while the camera rests.", "While the camera moves, pictures are smaller."
        self.rows = gui.add_slider("Rows at rest", 100, 2160, 20, 800, hint=rest)
        self.rate = gui.add_slider("Frames/s", 1, 120, 1, rate, hint=moving)
        self.status = gui.add_markdown("Waiting for the first picture.")
        self.home = gui.add_button("Home", icon="home", hint=f"Returns to the initial view. {_KEYS}")
        for control in (self.mode, self.rows, self.rate):
            control.on_update(page.callback(lambda _: self._change()))
        self.fov.on_update(page.callback(self._widen))
        self.home.on_click(page.callback(lambda client: page.move(client, page.home.fitted(client.camera.aspect))))

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
        self.status.content = status

    def _widen(self, client: Any) -> None:
        if client is not None:  # otherwise the value was set to that of the camera
            client.camera.fov = math.radians(self.fov.value)

    def _change(self) -> None:
        self.colors.visible = self.mode.value == "depth"
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
        self._all = page.server.scene.add_frame("/overlays/cameras", show_axes=False, visible=False)
        self.shown = gui.add_checkbox("Show cameras", False, hint="Click one to go there.")
        self.view = gui.add_dropdown("Go to", tuple(photographs))
        gui.add_markdown(_COLORS)
        self.frusta: list[Any] = []
        # Reading all photographs takes long, but must happen only once.
        self.shown.on_update(page.callback(lambda _: self._show(), threading.RLock()))
        self.view.on_update(page.callback(self._move))

    def _show(self) -> None:
        if self.shown.value and not self.frusta:
            photographs = self.photographs.items()
            self.frusta = [self._frustum(name, *each) for name, each in photographs if not self._page.closed]
            self._page.update_visibility()
        self._all.visible = self.shown.value

    def _frustum(self, name: str, split: Split, index: int) -> Any:
        width, height = split.cameras.size(index)
        image = Image.fromarray(split.image(index).numpy())
        return self._page.add_frustum(
            f"cameras/{name}",
            viewpoint_of(split.cameras, index),
            width / height,
            *(self.view, name, self._move),
            scale=self._scale,
            color=_SPLIT_COLORS[name.partition("/")[0]],
            image=np.asarray(thumbnail(image, _THUMBNAIL_SIDE, self._page.background)),
            format="jpeg",
        )

    def _move(self, client: Any) -> None:
        if client is not None:  # otherwise the value was set by a click at a frustum
            split, index = self.photographs[self.view.value]
            self._page.move(client, viewpoint_of(split.cameras, index, aspect=client.camera.aspect))


class PathPanel:
    """Key cameras and the path through them: preview, video, file, and the command with which a run renders it."""

    def __init__(self, page: ViewerPage, tab: Any, run_path: Path) -> None:
        self._page, self._tab = page, tab
        self.frusta: list[Any] = []
        self._drawn = page.server.scene.add_frame("/overlays/path", show_axes=False)
        self._rendering = threading.Lock()
        self._next_file = 0.0
        gui = page.server.gui
        self.add = gui.add_button("Add key camera", icon="plus", hint="At the current camera pose.")
        self.orbit = gui.add_button("Orbit", icon="rotate-360", hint="A circle from here, as dragging would turn.")
        self.key = gui.add_dropdown("Key camera", ("none",))
        self.edit = gui.add_button_group("", ("Replace", "Remove", "Clear"))
        self.loop = gui.add_checkbox("Loop", False, hint="Leads from the last key camera back to the first.")
        self.seconds = gui.add_number("Seconds", 6.0, min=0.1, max=3600.0, step=0.1)
        self.fps = gui.add_number("Frames/s", 30, min=1, max=240, step=1)
        self.size = gui.add_vector2("Size", (1920, 1080), min=(16, 16), max=(3840, 3840), step=2)
        self.time = gui.add_slider("Time", 0.0, 6.0, 0.01, 0.0)
        self.play = gui.add_button("Play / stop", icon="player-play")
        self.render = gui.add_button("Render video / stop", icon="video", hint="Sends this browser the path as MP4.")
        self.progress = gui.add_progress_bar(0, visible=False)
        self.export = gui.add_button(f"Save {PATH_FILE}", icon="download")
        # A text field, because Markdown would interpret the name of the run.
        command = f"voxelfield render {in_shell(run_path)} --path {PATH_FILE}"
        hint = "Renders the video of a saved path."
        self.command = gui.add_text("Command", command, multiline=True, disabled=True, hint=hint)
        self.add.on_click(page.callback(lambda client: self.change([*self.keys, viewpoint_of_camera(client.camera)])))
        self.orbit.on_click(page.callback(self._orbit))
        self.key.on_update(page.callback(self._go))
        self.edit.on_click(page.callback(self._edit))
        for control in (self.loop, self.seconds):
            control.on_update(page.callback(lambda _: self.change(self.keys)))
        # A second click stops what the first has begun, and so must not wait for it.
        for button, work in ((self.play, self._play), (self.render, self._render)):
            button.on_click(page.callback(work, contextlib.nullcontext()))
        self.export.on_click(page.callback(self._save))

    def stations(self) -> Cameras:
        """Returns the cameras of all frames on a smooth path; raises ValueError if there are none, or too many."""
        seconds, fps = float(self.seconds.value), int(self.fps.value)
        frames = max(1, round(seconds * fps))
        if frames > MOST_FRAMES:
            raise ValueError(f"seconds times fps must be at most {MOST_FRAMES} frames, got {seconds:g} x {fps}")
        if not self.keys:
            raise ValueError("a path needs a key camera: add one, or an orbit")
        width, height = (round(side) for side in self.size.value)
        keys = [key.cameras(height, width) for key in self.keys]
        c2w, intrinsics = torch.cat([key.c2w for key in keys]), torch.cat([key.intrinsics for key in keys])
        return through(Cameras(c2w, intrinsics, width, height), frames, closed=self.loop.value)

    def change(self, keys: list[Viewpoint], chosen: int = -1) -> None:
        """Sets the key cameras, of which one is chosen, and shows them, their times and the path."""
        if len(keys) > MOST_KEYS:
            raise ValueError(f"a path has at most {MOST_KEYS} key cameras")
        self.keys, count, scene, seconds = keys, len(keys), self._page.server.scene, float(self.seconds.value)
        self.export.disabled = self.render.disabled = self.play.disabled = count == 0
        spans = max(1, count - (not self.loop.value))
        times = tuple(seconds * number / spans for number in range(count))
        self.key.options = tuple(f"{number}: {time:.2f} s" for number, time in enumerate(times, 1)) or ("none",)
        self.key.value = self.key.options[min(chosen, len(self.key.options) - 1)]
        # A slider keeps its range and its marks.
        order = self.time.order
        self.time.remove()
        with self._tab:
            self.time = self._page.server.gui.add_slider("Time", 0.0, seconds, 0.01, 0.0, marks=times, order=order)
        self.time.on_update(self._page.callback(lambda client: self._seek(client, self.stations(), self.time.value)))
        self._drawn.remove()  # with all frusta
        self._drawn, (width, height) = scene.add_frame("/overlays/path", show_axes=False), self.size.value
        options, style = self.key.options, {"scale": 0.05 * self._page.extent, "color": _PATH_COLOR}
        self.frusta = [
            self._page.add_frustum(f"path/{number}", key, width / height, self.key, options[number], self._go, **style)
            for number, key in enumerate(keys)
        ]
        if count > 1:
            points = np.array([frustum.position for frustum in self.frusta])
            line = {"closed": self.loop.value, "color": _PATH_COLOR, "thickness": 2.0, "thickness_units": "screen"}
            scene.add_spline_catmull_rom("/overlays/path/line", points, curve_type="catmullrom", **line)
        self._page.update_visibility()

    def _go(self, client: Any) -> None:
        if client is not None and self.keys:  # otherwise the value was set here
            self._page.move(client, self.keys[self.key.options.index(self.key.value)])

    def _edit(self, client: Any) -> None:
        keys, chosen = list(self.keys), self.key.options.index(self.key.value)
        if self.edit.value == "Replace" and keys:
            keys[chosen] = viewpoint_of_camera(client.camera)
        elif self.edit.value == "Remove":
            del keys[chosen : chosen + 1]
        self.change([] if self.edit.value == "Clear" else keys, chosen)

    def _orbit(self, client: Any) -> None:
        """Makes the path a circle from a browser's camera about what it looks at."""
        angles = torch.arange(_ORBIT_KEYS) * (2 * math.pi / _ORBIT_KEYS)
        if self._page.faces_forward:  # there is nothing to see from behind
            angles = 0.25 * angles.sin()
        self.loop.value = True
        centre = torch.from_numpy(client.camera.look_at)
        self.change(turned(viewpoint_of_camera(client.camera), centre, self._page.up, angles))

    def _seek(self, client: Any, stations: Cameras, seconds: float) -> None:
        self._page.move(client, viewpoint_of(stations, min(int(seconds * self.fps.value), len(stations) - 1)))

    def _play(self, client: Any) -> None:
        overlays = self._page.overlays
        if not overlays.visible:
            overlays.visible = True  # which ends the playing
            return
        stations, began, seconds = self.stations(), time.monotonic(), 0.0
        overlays.visible = False
        try:
            while self._page.serves(client) and not overlays.visible and seconds <= self.seconds.value:
                seconds = time.monotonic() - began
                self._seek(client, stations, seconds)
                time.sleep(1 / _PLAYED_PER_SECOND)
        finally:
            overlays.visible = True

    def _render(self, client: Any) -> None:
        if self._rendering.locked():
            self.progress.visible = False  # which ends the rendering
            return
        with self._rendering, tempfile.TemporaryDirectory() as folder, self._page.worker.stream():
            self.progress.visible, file = True, Path(folder) / VIDEO_FILE
            try:
                write_video(file, self._frames(client), float(self.fps.value))
            finally:
                self.progress.visible = False
            client.send_file_download(VIDEO_FILE, file.read_bytes(), save_immediately=True)

    def _frames(self, client: Any) -> Iterator[Tensor]:
        """Renders the images of the path, while the progress is visible."""
        stations, painter, shown = self.stations(), self._page.worker.painter, self._page.view.mode.value
        if painter is None:
            raise ValueError("there is no field yet")
        renderer = painter.run.renderer()
        depths = depth_range(renderer, stations) if shown == "depth" else (0.5, 1.0)
        for count, view in enumerate(painter.run.render_path(stations, renderer), 1):
            if not (self.progress.visible and self._page.serves(client)):
                raise ValueError("the video was stopped")
            self.progress.value = 100 * count / len(stations)
            yield picture(view, shown, depths)

    def _save(self, client: Any) -> None:
        # A browser that does not read would make files pile up here.
        if time.monotonic() < self._next_file:
            raise ValueError("a path can be saved once per second")
        content = camera_path_file(self.stations(), int(self.fps.value), self._page.origin)
        self._next_file = time.monotonic() + _SECONDS_BETWEEN_FILES
        client.send_file_download(PATH_FILE, content, save_immediately=True)
