"""Fetch a public scene."""

from __future__ import annotations

import argparse
from pathlib import Path

from voxelfield.datasets.download import download, downloadable_scenes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("scene", help=f"one of: {', '.join(downloadable_scenes())}")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of scenes (default: data)")
    parser.add_argument("--url", action="append", help="zip archive to try instead of the public ones; may be repeated")


def run(options: argparse.Namespace) -> None:
    """Downloads the scene."""
    download(options.scene, options.root, options.url)
