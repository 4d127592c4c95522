"""``voxelfield inspect``: draws a scene's cameras, box and images, and warns of what usually goes wrong."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from voxelfield.captures.inspection import PAGE, PICTURE, inspect_scene
from voxelfield.cli.errors import in_one_line
from voxelfield.datasets.loading import folder_of
from voxelfield.datasets.locate import configured_box

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and inspects; returns the exit status, 0 also where there are warnings."""
    parser = argparse.ArgumentParser(
        prog="voxelfield inspect",
        description="Draw a scene's cameras, box, points and images into one picture and one page, and warn of "
        "common problems.",
    )
    parser.add_argument("scene", metavar="FOLDER", help="folder or name of the scene")
    parser.add_argument("-o", "--out", type=Path, help=f"folder for {PICTURE} and {PAGE} (default: the current folder)")
    parser.add_argument(
        "--data-root", type=Path, default=Path("data"), help="folder of scenes given by name (default: data)"
    )
    parser.add_argument(
        "--model", type=int, metavar="N", help="COLMAP model sparse/N (default: that with the most photographs)"
    )
    options = parser.parse_args(arguments)
    return in_one_line(lambda: _inspect(options))


def _inspect(options: argparse.Namespace) -> None:
    folder, out = folder_of(options.scene, options.data_root), options.out or Path()
    with _quiet_loading():
        rows, findings = inspect_scene(folder, out, configured_box(options.scene), options.model)
    for label, text in rows:
        logger.info("%-34s %s", label, text)
    for finding in findings:
        logger.warning("warning: %s: %s", finding.title, finding.message)
    logger.info("wrote %s and %s", out / PICTURE, out / PAGE)


@contextlib.contextmanager
def _quiet_loading() -> Iterator[None]:
    """Keeps the loader from telling the sizes of the small copies, which would pass for those of the images."""
    loading = logging.getLogger("voxelfield.datasets.loading")
    level = loading.level
    loading.setLevel(logging.WARNING)
    try:
        yield
    finally:
        loading.setLevel(level)
