"""The wooden crate, which stands on the jetty and hangs from the crane."""

from __future__ import annotations

from make_bricks.geometry.model import Model


def build_crate(model: Model, size: float) -> None:
    """Adds a crate of slats that stands on the origin of the current frame."""
    half, slats = size / 2, 4
    model.box("wood", (-half + 0.05, -half + 0.05, 0), (half - 0.05, half - 0.05, size - 0.05), 0.02)
    for k in range(slats):
        low = k * size / slats
        model.box("wood_light", (-half, -half, low + 0.03), (half, half, low + size / slats - 0.03), 0.02)
    for x in (-half, half):
        for y in (-half, half):
            model.box("wood", (x - 0.08, y - 0.08, 0), (x + 0.08, y + 0.08, size), 0.02)
