"""``voxelfield build``: compiles the extension; the same as ``python -m voxelfield.build``."""

from __future__ import annotations

from collections.abc import Sequence

from voxelfield.build import main as build


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and builds; returns the exit status."""
    build(None if arguments is None else list(arguments))
    return 0
