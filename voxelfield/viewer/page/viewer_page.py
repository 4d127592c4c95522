"""The page as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from voxelfield.rendering.cameras import Cameras
from voxelfield.viewer.curves import Curves
from voxelfield.viewer.drawing.photographs import Photographs
from voxelfield.viewer.page.address import Address, import_viser, quiet
from voxelfield.viewer.page.cameras_panel import CamerasPanel
from voxelfield.viewer.page.path_panel import PathPanel
from voxelfield.viewer.page.region_panel import RegionPanel
from voxelfield.viewer.page.stage import Stage
from voxelfield.viewer.page.training_panel import TrainingPanel
from voxelfield.viewer.page.view_panel import ViewPanel
from voxelfield.viewer.scheduling.live import LiveField
from voxelfield.viewer.scheduling.source import Source
from voxelfield.viewer.scheduling.worker import Frame, RenderWorker
from voxelfield.viewer.serving.viser_server import start_guarded_server

_BRAND = (47, 111, 220)
_JPEG_MOVING, _JPEG_AT_REST = 80, 95

# Frames per second that a machine can usually keep with a picture one can still read.
_RATE_CPU, _RATE_CUDA = 6, 60


class ViewerPage:
    """Serves a page on which a field can be walked through.

    Args:
        address: Where.
        title: What is shown, such as the scene's name.
        run: How the run is called on a command line.
        source: Where the field comes from.
        photographs: Photographs of the scene, in the frame of the field; there may be none.
        boxes: (2, 3) each on the CPU, the smallest first: what matters of the scene, and what is around, world units.
        background: (3,) colour behind transparent photographs, on the CPU.
        curves: What the training logs, or logged.
        live: The training in progress, if any.
        reference: Camera of the first view if there are no photographs; None looks at the first box from outside.

    Raises:
        ValueError: The port cannot be listened on.
        MissingPackageError: viser is not installed.
    """

    def __init__(
        self,
        address: Address,
        title: str,
        run: str,
        source: Source,
        photographs: Photographs,
        boxes: Sequence[torch.Tensor],
        background: torch.Tensor,
        curves: Curves,
        live: LiveField | None = None,
        reference: Cameras | None = None,
    ) -> None:
        import_viser()
        address.check()
        self.address = address
        rate = _RATE_CUDA if source.device.type == "cuda" else _RATE_CPU
        with quiet():
            self.server = start_guarded_server(address.host, address.port, f"voxelfield: {title}", address.admission)
        try:
            if self.server.get_port() != address.port:
                raise ValueError(f"{address.names[1]} must be a free port, got {address.port}, which was just taken")
            self.worker = RenderWorker(source, self._deliver, photographs=photographs, frames_per_second=rate)
            self.stage = Stage(self.server, self.worker, photographs, boxes, reference)
            self._lay_out(run, background, curves, live, rate)
        except BaseException:
            self._stop_server()
            raise
        self._live = live
        self.server.on_client_connect(self._welcome)
        self.server.on_client_disconnect(self._leave)

    def close(self) -> None:
        """Stops serving."""
        self.training.close()
        self.worker.close()
        self._stop_server()

    def _stop_server(self) -> None:
        with quiet():
            self.server.stop()

    def _lay_out(self, run: str, background: torch.Tensor, curves: Curves, live: LiveField | None, rate: int) -> None:
        server, stage = self.server, self.stage
        server.gui.configure_theme(control_width="medium", show_logo=False, show_share_button=False, brand_color=_BRAND)
        server.scene.set_up_direction(stage.up().tolist())
        home = stage.home()
        c2w = home.matrix.double()
        camera = server.initial_camera
        camera.position = c2w[:3, 3].numpy()
        camera.look_at = (c2w[:3, 3] - stage.distance_ahead(home) * c2w[:3, 2]).numpy()
        camera.fov = home.fov
        camera.near, camera.far = 1e-3 * stage.extent, 1e3 * stage.extent
        tabs = server.gui.add_tab_group()
        with tabs.add_tab("View", icon="eye"):
            self.view = ViewPanel(stage, rate)
            self.region = RegionPanel(stage)
        self.cameras: CamerasPanel | None = None
        if len(stage.photographs):
            with tabs.add_tab("Cameras", icon="camera"):
                self.cameras = CamerasPanel(stage, background)
        with tabs.add_tab("Path", icon="route"):
            self.path = PathPanel(stage, run)
        with tabs.add_tab("Training", icon="chart-line"):
            self.training = TrainingPanel(stage, curves, live)

    def _welcome(self, client: Any) -> None:
        stage = self.stage

        # A coroutine runs where messages arrive, instead of waiting for a thread of viser's.
        async def moved(_: Any) -> None:
            stage.ask(client)
            if self.cameras is not None:
                self.cameras.clear_view()

        client.camera.on_update(moved)
        stage.ask(client)

    # A coroutine, for the same reason: whatever keeps the threads busy, what a client has asked for ends with it.
    async def _leave(self, client: Any) -> None:
        self.stage.leave(client)

    def _deliver(self, who: int, frame: Frame) -> None:
        client = self.server.get_clients().get(who)
        if client is None:
            self.worker.forget(who)
            return
        quality = _JPEG_AT_REST if frame.sharp else _JPEG_MOVING
        client.scene.set_background_image(frame.pixels.numpy(), format="jpeg", jpeg_quality=quality)
        # Without this it would wait for the next sixtieth of a second.
        client.flush()
        self.view.tell(frame)
