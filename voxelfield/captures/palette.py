"""Colours of the pictures and of the page."""

from __future__ import annotations

_SPLITS = {"train": "#1f6fb4", "val": "#2e8b57", "test": "#d9660a"}

MUTED = "#9aa0a6"
"""Colour of secondary elements."""

WARNING = "#c5221f"
"""Colour of warnings."""

BOX = "#202124"
"""Colour of the scene's box."""


def split_color(name: str) -> str:
    """Returns the colour of a split's cameras and names."""
    return _SPLITS.get(name, MUTED)
