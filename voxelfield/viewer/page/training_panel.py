"""The panel that follows a training: curves, pause, single steps."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from voxelfield.viewer.curves import Curves
from voxelfield.viewer.page.stage import Stage
from voxelfield.viewer.scheduling.live import LiveField

_REFRESH_SECONDS = 1.0
_COLOR = "#2f6fdc"

_CHARTS = {
    "test/psnr": "PSNR of test views, dB",
    "train/psnr": "PSNR of training pixels, dB",
    "loss/photometric": "Photometric loss",
    "train/rays_per_second": "Rays per second",
}


class TrainingPanel:
    """Charts of logged numbers and, during training, controls to pause and step.

    Args:
        stage: What is shown.
        curves: What is logged.
        live: The training in progress; None if it has ended.
    """

    def __init__(self, stage: Stage, curves: Curves, live: LiveField | None) -> None:
        self._stage = stage
        self._curves = curves
        self._live = live
        self._drawn_version = -1
        self._closed = threading.Event()
        gui = stage.server.gui
        self.status = gui.add_markdown("")
        self.charts: dict[str, Any] = {}
        if live is not None:
            self.pause = gui.add_button("Pause", icon="player-pause")
            self.steps = gui.add_number("Steps per click", 1, min=1, max=100000, step=1)
            self.step = gui.add_button("Step", icon="player-skip-forward", disabled=True)
            self.pause.on_click(lambda _: self._toggle(live))
            self.step.on_click(lambda _: live.allow(int(self.steps.value)))
        self._container = gui.add_folder("Curves")
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
                self._set(self.status, "content", "No training records of this run were found.")
            return
        paused = self._live.paused
        self._set(self.pause, "label", "Resume" if paused else "Pause")
        self._set(self.step, "disabled", not paused)
        state = "paused" if paused else "training"
        self._set(self.status, "content", f"Step **{self._live.step}** of {self._live.steps}, {state}")

    @staticmethod
    def _set(handle: Any, name: str, value: Any) -> None:
        """Sets an attribute only if its value differs, because every assignment sends a message to every browser."""
        if getattr(handle, name) != value:
            setattr(handle, name, value)

    def _draw(self) -> None:
        version = self._curves.version
        if version == self._drawn_version:
            return
        self._drawn_version = version
        last = 0.0
        for tag, title in _CHARTS.items():
            steps, values = (np.asarray(row) for row in self._curves.series(tag))
            # A chart of a single point has no scale.
            if len(steps) < 2:
                continue
            last = max(last, float(steps[-1]))
            unit, word = _unit(float(np.abs(values).max()))
            data = (steps, values / unit)
            if tag in self.charts:
                self.charts[tag].data = data
            else:
                self.charts[tag] = self._chart(f"{title}{word}", data)
        if self.charts and self._live is None:
            self._set(self.status, "content", f"Trained for **{last:.0f}** steps.")

    def _chart(self, title: str, data: tuple[np.ndarray, ...]) -> Any:
        from viser import uplot

        series = (uplot.Series(label="step"), uplot.Series(label="value", stroke=_COLOR, width=2))
        scales = {"x": uplot.Scale(time=False)}
        with self._container:
            return self._stage.server.gui.add_uplot(data, series, title=title, scales=scales, aspect=1.7)


def _unit(largest: float) -> tuple[float, str]:
    """Returns what to divide numbers by so that an axis has room for them, and how a title calls that."""
    for unit, word in ((1e6, ", millions"), (1e4, ", thousands")):
        if largest >= unit:
            return (1e6 if unit == 1e6 else 1e3), word
    return 1.0, ""
