"""The panel of a training in progress."""

from __future__ import annotations

from voxelfield.viewer.live import LiveField
from voxelfield.viewer.state import ViewerState


class TrainingPanel:
    """Progress and pausing.

    Args:
        state: The page.
        live: The training in progress.
    """

    def __init__(self, state: ViewerState, live: LiveField) -> None:
        self._live = live
        gui = state.server.gui
        self.status = gui.add_markdown("")
        self.pause = gui.add_button("Pause", icon="player-pause")
        gui.add_markdown("TensorBoard shows the curves.")
        self.pause.on_click(state.callback(lambda _: self._toggle()))
        self.show_progress()

    def show_progress(self) -> None:
        """Shows the number of steps done; called after each picture."""
        paused = self._live.paused
        progress = f"Step **{self._live.step}** of {self._live.steps}, {'paused' if paused else 'training'}"
        label = "Resume" if paused else "Pause"
        # Each assignment sends a message to every browser.
        if self.status.content != progress:
            self.status.content = progress
        if self.pause.label != label:
            self.pause.label = label

    def _toggle(self) -> None:
        if self._live.paused:
            self._live.resume()
        else:
            self._live.pause()
        self.show_progress()
