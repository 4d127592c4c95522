"""Draw a scene's cameras, box and points, show its images on a page, and warn of common problems."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from voxelfield.captures.inspection import PAGE, PICTURE, inspect_scene
from voxelfield.datasets.loading import configured_box, scene_of

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("scene", metavar="FOLDER", help="folder or name of the scene")
    add("-o", "--out", type=Path, help=f"folder for {PICTURE} and {PAGE} (default: the current folder)")
    add("--data-root", type=Path, default=Path("data"), help="folder of scenes given by name (default: data)")
    add("--model", type=int, metavar="N", help="COLMAP model sparse/N (default: that with the most photographs)")


def run(options: argparse.Namespace) -> None:
    """Inspects the scene; warnings do not change the exit status."""
    folder, out = scene_of(options.scene, options.data_root).folder, options.out or Path()
    rows, findings = inspect_scene(folder, out, configured_box(options.scene), options.model)
    for label, text in rows:
        logger.info("%-34s %s", label, text)
    for finding in findings:
        logger.warning("warning: %s: %s", finding.title, finding.message)
    logger.info("wrote %s and %s", out / PICTURE, out / PAGE)
