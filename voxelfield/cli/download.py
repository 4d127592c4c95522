"""``voxelfield download``: fetches a public scene."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from voxelfield.cli.log_lines import one_line_records
from voxelfield.datasets.download import DownloadError, download, downloadable_scenes

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and downloads; returns the exit status."""
    parser = argparse.ArgumentParser(prog="voxelfield download", description="Fetch a public scene.")
    parser.add_argument("scene", help=f"one of: {', '.join(downloadable_scenes())}")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of scenes (default: data)")
    parser.add_argument("--url", action="append", help="zip archive to try instead of the public ones; may be repeated")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with one_line_records():
        try:
            download(options.scene, options.root, options.url)
        except (DownloadError, ModuleNotFoundError, OSError, ValueError) as error:
            logger.error("%s", error)
            return 1
    return 0
