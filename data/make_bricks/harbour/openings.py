"""Windows and doors."""

from __future__ import annotations

from make_bricks.geometry.model import Model


def build_window(model: Model, width: float, height: float) -> None:
    """Adds a window with bars that faces negative y; its pane lies in the xz plane of the current frame."""
    half, bar = width / 2, 0.12
    model.box("navy", (-half, 0, 0), (half, 0.18, height), 0.02)
    for x in (-half, half):
        model.box("white", (x - bar, -0.2, -bar), (x + bar, 0.1, height + bar), 0.03)
    for z in (0.0, height):
        model.box("white", (-half, -0.2, z - bar), (half, 0.1, z + bar), 0.03)
    model.box("white", (-0.05, -0.1, 0), (0.05, 0.04, height), 0.02)
    model.box("white", (-half, -0.1, height / 2 - 0.05), (half, 0.04, height / 2 + 0.05), 0.02)


def build_door(model: Model, width: float, height: float, material: str) -> None:
    """Adds a panelled door that faces negative y; it lies in the xz plane of the current frame."""
    half = width / 2
    model.box("white", (-half - 0.15, -0.05, 0), (half + 0.15, 0.3, height + 0.15), 0.03)
    model.box(material, (-half, -0.12, 0), (half, 0.2, height), 0.03)
    for z in (0.2, height / 2 + 0.1):
        model.box("cream", (-half + 0.15, -0.17, z), (half - 0.15, 0, z + height / 2 - 0.35), 0.03)
    model.strut("yellow", (half - 0.1, -0.25, height / 2), (half - 0.1, -0.1, height / 2), 0.07)
