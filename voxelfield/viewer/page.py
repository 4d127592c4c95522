"""The page as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.address import Address, import_viser
from voxelfield.viewer.path_panel import PathPanel
from voxelfield.viewer.photographs import CamerasPanel, Photographs
from voxelfield.viewer.pictures import MODES
from voxelfield.viewer.state import DEFAULT_ROWS, ViewerState
from voxelfield.viewer.worker import Picture, RenderWorker

_BRAND_COLOR = (47, 111, 220)
_JPEG_MOVING, _JPEG_AT_REST = 80, 95

# Desired frames per second at which pictures are usually still legible.
_RATE_CPU, _RATE_CUDA = 6, 60

_KEYS = """
- **drag** to orbit, **right-drag** to move sideways, **scroll** to come closer
- **W A S D** to fly level, **Q** and **E** down and up, **arrow keys** to turn
"""
_EMPTY = "Only the background is visible: the field is empty, or the camera looks elsewhere."
_SECONDS_BETWEEN_STATUS = 0.5


class ViewerPage:
    """Serves a page for exploring a field.

    Args:
        address: Where to serve it.
        run: The field, or its state at the beginning of the training in progress.
        name: The run's path for the command line.
        photographs: Photographs of the scene, in the frame in which the field was trained; there may be none.
        poll: Returns the field if training has changed it since the last call; None if it does not change.
        progress: Returns the progress of training, in Markdown.

    Raises:
        ValueError: The port cannot be listened on.
        MissingPackageError: viser is not installed, or is a version that bypasses the checks.
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
        import_viser()
        address.check()
        # Its import needs viser.
        from voxelfield.viewer.server import start_server

        self.address = address
        self.server = start_server(address, f"voxelfield: {run.config.scene.name}")
        device = run.model.device
        rate = _RATE_CUDA if device.type == "cuda" else _RATE_CPU
        self.worker = RenderWorker(device, self._deliver, rate, run if poll is None else poll)
        first = photographs.camera(0) if len(photographs) else None
        self.state = ViewerState(self.server, self.worker, run, first)
        gui = self.server.gui
        gui.configure_theme(control_width="medium", show_logo=False, show_share_button=False, brand_color=_BRAND_COLOR)
        self.server.scene.set_up_direction(self.state.up.tolist())
        camera, extent = self.server.initial_camera, self.state.extent
        self.state.place(camera, self.state.home)
        camera.near, camera.far = 1e-3 * extent, 1e3 * extent
        tabs = gui.add_tab_group()
        with tabs.add_tab("View", icon="eye"):
            self.view = ViewPanel(self.state, rate, progress)
        self.cameras: CamerasPanel | None = None
        if len(photographs):
            with tabs.add_tab("Cameras", icon="camera"):
                self.cameras = CamerasPanel(self.state, photographs)
        with tabs.add_tab("Path", icon="route"):
            self.path = PathPanel(self.state, name)
        self.server.on_client_connect(self._connect)
        self.server.on_client_disconnect(self._disconnect)

    def close(self) -> None:
        """Stops serving."""
        from voxelfield.viewer.server import stop_server

        self.worker.close()
        stop_server(self.server)

    # Coroutines run where messages arrive, without waiting for a thread of viser's pool.
    async def _connect(self, client: Any) -> None:
        async def moved(_: Any) -> None:
            self.state.request(client)
            if self.cameras is not None:
                self.cameras.update_visibility()

        client.camera.on_update(moved)
        self.state.request(client)

    async def _disconnect(self, client: Any) -> None:
        self.worker.disconnect(client.client_id)

    def _deliver(self, client_id: int, picture: Picture) -> None:
        client = self.server.get_clients().get(client_id)
        if client is None:
            self.worker.disconnect(client_id)
            return
        quality = _JPEG_AT_REST if picture.sharp else _JPEG_MOVING
        client.scene.set_background_image(picture.pixels.numpy(), format="jpeg", jpeg_quality=quality)
        # Otherwise viser would send it up to a sixtieth of a second later.
        client.flush()
        self.view.show_status(picture)


class ViewPanel:
    """Displayed quantity, resolution, and the way back.

    Args:
        state: The page.
        rate: Desired frames per second while a camera moves.
        progress: Returns the progress of training, in Markdown.
    """

    def __init__(self, state: ViewerState, rate: int, progress: Callable[[], str]) -> None:
        self._state = state
        self._progress = progress
        self._status_shown = 0.0
        gui, worker = state.server.gui, state.worker
        self.mode = gui.add_dropdown("Show", MODES, initial_value="rgb", hint="Depth is blue near, red far away.")
        hint = "Picture height while the camera rests."
        self.rows = gui.add_slider("Rows at rest", 100, 2160, 20, DEFAULT_ROWS, hint=hint)
        hint = "While the camera moves, pictures are smaller."
        self.rate = gui.add_slider("Moving, frames/s", 1, 120, 1, rate, hint=hint)
        self.status = gui.add_markdown("Waiting for the first picture.")
        self.home = gui.add_button("Home", icon="home", hint="Returns to the initial view.")
        with gui.add_folder("Keys", expand_by_default=False, order=1e6):
            gui.add_markdown(_KEYS)
        self.mode.on_update(state.callback(lambda _: setattr(worker, "mode", self.mode.value)))
        self.rows.on_update(state.callback(lambda _: self._change_rows()))
        self.rate.on_update(state.callback(lambda _: setattr(worker, "frames_per_second", float(self.rate.value))))
        self.home.on_click(state.callback(lambda client: state.move(client, state.home)))

    def show_status(self, picture: Picture) -> None:
        """Shows the drawing time of a sharp picture, and now and then of others."""
        now = time.perf_counter()
        if not picture.sharp and now - self._status_shown < _SECONDS_BETWEEN_STATUS:
            return
        self._status_shown = now
        height, width = picture.pixels.shape[:2]
        status = f"{width} x {height} in {1000 * picture.seconds:.0f} ms ({'at rest' if picture.sharp else 'moving'})"
        if picture.sharp and bool((picture.pixels == picture.pixels[0, 0]).all()):
            status += f"\n\n**{_EMPTY}**"
        self.status.content = f"{status}\n\n{self._progress()}".rstrip()

    def _change_rows(self) -> None:
        self._state.rows = self.rows.value
        self._state.request_all()
