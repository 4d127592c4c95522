"""The panel that follows a training: curves, pause, single steps."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from voxelfield.viewer.curves import Curves
from voxelfield.viewer.page.stage import Stage
from voxelfield.viewer.scheduling.live import LiveField

_REFRESH_SECONDS = 1.0
_COLORS = ("#2f6fdc", "#dc782f", "#3a9a5b", "#9a3a8f")

_CHARTS = {
    "PSNR, dB": ("train/psnr", "test/psnr"),
    "Photometric loss": ("loss/photometric",),
    "Rays per second": ("train/rays_per_second",),
}


class TrainingPanel:
    """Charts of what is logged; and, while training goes on, its reins.

    Args:
        stage: What is shown.
        curves: What is logged.
        live: The training that goes on; None: it has ended.
    """

    def __init__(self, stage: Stage, curves: Curves, live: LiveField | None) -> None:
        self._stage = stage
        self._curves = curves
        self._live = live
        self._drawn_version = -1
        self._closed = threading.Event()
        gui = stage.server.gui
        self.status = gui.add_markdown("")
        self._container = gui.add_folder("Curves")
        self.charts: dict[str, Any] = {}
        if live is not None:
            self.pause = gui.add_button("Pause", icon="player-pause")
            self.steps = gui.add_number("Steps at once", 1, min=1, max=100000, step=1)
            self.step = gui.add_button("Step", icon="player-skip-forward", disabled=True)
            self.pause.on_click(lambda _: self._toggle(live))
            self.step.on_click(lambda _: live.allow(int(self.steps.value)))
        self._thread = threading.Thread(target=self._follow, name="viewer charts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread that draws charts."""
        self._closed.set()
        self._thread.join(2 * _REFRESH_SECONDS)

    def _toggle(self, live: LiveField) -> None:
        if live.paused:
            live.resume()
        else:
            live.pause()
        self._tell()

    def _follow(self) -> None:
        while True:
            self._tell()
            self._draw()
            if self._closed.wait(_REFRESH_SECONDS):
                return

    def _tell(self) -> None:
        if self._live is None:
            if not self.charts:
                self._set(self.status, "content", "Nothing of this run's training is recorded.")
            return
        paused = self._live.paused
        self._set(self.pause, "label", "Go on" if paused else "Pause")
        self._set(self.step, "disabled", not paused)
        state = "paused" if paused else "training"
        self._set(self.status, "content", f"Step **{self._live.step}** of {self._live.steps}, {state}")

    @staticmethod
    def _set(handle: Any, name: str, value: Any) -> None:
        """Changes what has changed: every change is a message to every browser."""
        if getattr(handle, name) != value:
            setattr(handle, name, value)

    def _draw(self) -> None:
        version = self._curves.version
        if version == self._drawn_version:
            return
        self._drawn_version = version
        known = set(self._curves.tags())
        for title, wanted in _CHARTS.items():
            tags = [tag for tag in wanted if tag in known]
            table = self._curves.table(tags)
            # A chart of a single point has no scale.
            if not tags or len(table[0]) < 2:
                continue
            data = tuple(np.asarray(row, dtype=np.float64) for row in table)
            chart = self.charts.get(title)
            if chart is not None and len(chart.data) == len(data):
                chart.data = data
                continue
            if chart is not None:
                chart.remove()
            self.charts[title] = self._chart(title, tags, data)
        if self.charts and self._live is None:
            last = int(max(max(self._curves.table([tag])[0], default=0) for tag in known))
            self._set(self.status, "content", f"Trained for **{last}** steps.")

    def _chart(self, title: str, tags: list[str], data: tuple[np.ndarray, ...]) -> Any:
        from viser import uplot

        series = [uplot.Series(label="step")]
        series += [
            uplot.Series(label=tag, stroke=color, width=2, spanGaps=True)
            for tag, color in zip(tags, _COLORS, strict=False)
        ]
        with self._container:
            return self._stage.server.gui.add_uplot(
                data, tuple(series), title=title, scales={"x": uplot.Scale(time=False)}, aspect=1.6
            )
