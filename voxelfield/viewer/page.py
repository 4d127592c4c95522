"""The page as a whole."""

from __future__ import annotations

from typing import Any

from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.address import Address, import_viser
from voxelfield.viewer.cameras_panel import CamerasPanel
from voxelfield.viewer.live import LiveField
from voxelfield.viewer.path_panel import PathPanel
from voxelfield.viewer.photographs import Photographs
from voxelfield.viewer.state import ViewerState
from voxelfield.viewer.training_panel import TrainingPanel
from voxelfield.viewer.view_panel import RegionPanel, ViewPanel
from voxelfield.viewer.worker import Picture, RenderWorker

_BRAND_COLOR = (47, 111, 220)
_JPEG_MOVING, _JPEG_AT_REST = 80, 95

# Desired frames per second at which pictures are usually still legible.
_RATE_CPU, _RATE_CUDA = 6.0, 60.0


class ViewerPage:
    """Serves a page for exploring a field.

    Args:
        address: Where to serve it.
        run: The field, or its state at the beginning of the training in progress.
        name: The run's path for the command line.
        photographs: Photographs of the scene, in the frame in which the field was trained; there may be none.
        live: The training in progress, if any.

    Raises:
        ValueError: The port cannot be listened on.
        MissingPackageError: viser is not installed.
    """

    def __init__(
        self,
        address: Address,
        run: TrainedModel,
        name: str,
        photographs: Photographs,
        live: LiveField | None = None,
    ) -> None:
        import_viser()
        address.check()
        # Its import needs viser.
        from voxelfield.viewer.server import start_server

        self.address = address
        self.server = start_server(address, f"voxelfield: {run.config.scene.name}")
        device = run.model.device
        self.worker = RenderWorker(
            device,
            self._deliver,
            run=run if live is None else None,
            poll=(lambda: None) if live is None else live.poll,
            photographs=photographs,
            frames_per_second=_RATE_CUDA if device.type == "cuda" else _RATE_CPU,
        )
        self.state = ViewerState(self.server, self.worker, run, photographs)
        self._lay_out(name, live)
        self.server.on_client_connect(self._connect)
        self.server.on_client_disconnect(self._disconnect)

    def close(self) -> None:
        """Stops serving."""
        from voxelfield.viewer.server import stop_server

        self.state.closed = True
        self.worker.close()
        stop_server(self.server)

    def _lay_out(self, name: str, live: LiveField | None) -> None:
        server, state = self.server, self.state
        server.gui.configure_theme(
            control_width="medium", show_logo=False, show_share_button=False, brand_color=_BRAND_COLOR
        )
        server.scene.set_up_direction(state.up.tolist())
        c2w = state.home.matrix.double()
        camera = server.initial_camera
        camera.position = c2w[:3, 3].numpy()
        camera.look_at = (c2w[:3, 3] - state.distance_ahead(state.home) * c2w[:3, 2]).numpy()
        camera.fov = state.home.fov
        camera.near, camera.far = 1e-3 * state.extent, 1e3 * state.extent
        tabs = server.gui.add_tab_group()
        with tabs.add_tab("View", icon="eye"):
            self.view = ViewPanel(state)
            self.region = RegionPanel(state)
        self.cameras: CamerasPanel | None = None
        if len(state.photographs):
            with tabs.add_tab("Cameras", icon="camera"):
                self.cameras = CamerasPanel(state)
        with tabs.add_tab("Path", icon="route"):
            self.path = PathPanel(state, name)
        self.training: TrainingPanel | None = None
        if live is not None:
            with tabs.add_tab("Training", icon="chart-line"):
                self.training = TrainingPanel(state, live)

    # Coroutines run where messages arrive, without waiting for a thread of viser's pool.
    async def _connect(self, client: Any) -> None:
        async def moved(_: Any) -> None:
            self.state.request(client)
            if self.cameras is not None:
                self.cameras.update_visibility()

        client.camera.on_update(moved)
        self.state.request(client)

    async def _disconnect(self, client: Any) -> None:
        self.state.disconnect(client)

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
        if self.training is not None:
            self.training.show_progress()
