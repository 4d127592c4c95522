"""Find the poses of photographs, or of frames of a video, and write a scene for training."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from voxelfield.captures.processing import REPORT, process

logger = logging.getLogger(__name__)

# Below this fraction of the photographs, something about the capture or the settings is likely wrong.
_FEW = 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("source", type=Path, metavar="PHOTOS_OR_VIDEO", help="a folder of photographs, or a video")
    add("-o", "--out", dest="folder", type=Path, required=True, metavar="FOLDER", help="the scene's folder")
    add(
        "--frames",
        type=int,
        default=120,
        help="take N frames from a video, each the sharpest of its part (default: 120)",
    )
    matching = "match all photographs, or neighbours by name (default: exhaustive, for a video sequential)"
    add("--matching", choices=("exhaustive", "sequential"), help=matching)
    add(
        "--camera-model",
        default="OPENCV",
        help="model of COLMAP, such as PINHOLE, SIMPLE_RADIAL or OPENCV (the default)",
    )
    shared = "use one camera per photograph (default: photographs of the same size share one)"
    add("--per-image-camera", dest="camera_per_image", action="store_true", help=shared)
    add(
        "--max-size",
        type=int,
        default=1600,
        help="shrink photographs whose longest side has more pixels (default: 1600)",
    )
    add("--overwrite", action="store_true", help="replace the results of an earlier call in FOLDER")


def run(options: argparse.Namespace) -> None:
    """Finds the poses."""
    report, folder = process(**vars(options)), options.folder
    logger.info("registered %d of %d photographs", report.registered, report.photographs)
    logger.info(
        "%d points, on average seen in %.1f photographs, with a reprojection error of %.2f pixels",
        *(report.points, report.mean_track_length, report.mean_reprojection_error),
    )
    if report.unregistered:
        logger.info("not registered: %s", ", ".join(report.unregistered))
    if report.other_models:
        others = " and ".join(map(str, report.other_models))
        logger.info("left out: smaller models of %s photographs, which overlap too little with this one", others)
    if report.registered < _FEW * report.photographs:
        remedy = "take more in between" + (", or try --matching exhaustive" if report.matching == "sequential" else "")
        logger.info("many photographs were not registered: %s", remedy)
    logger.info("wrote %s and %s; look at it with `voxelfield inspect %s`", folder, folder / REPORT, folder)
