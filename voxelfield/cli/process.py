"""``voxelfield process``: poses for photographs or a video, by structure from motion."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from voxelfield.captures.processing import REPORT, process
from voxelfield.captures.reconstruction import Report
from voxelfield.cli.errors import in_one_line

logger = logging.getLogger(__name__)

# Below this share of the photographs, something about the capture or the settings is likely wrong.
_FEW = 0.8


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and processes; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="voxelfield process",
        description="Find the poses of photographs, or of frames of a video, and write a scene for training.",
    )
    parser.add_argument("source", type=Path, metavar="PHOTOS_OR_VIDEO", help="a folder of photographs, or a video")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER", help="the scene's folder")
    parser.add_argument(
        "--frames",
        type=int,
        default=120,
        help="number of frames to take from a video, the sharpest of each equal part (default: 120)",
    )
    parser.add_argument(
        "--matching",
        choices=("exhaustive", "sequential"),
        help="match all photographs, or neighbours by name (default: exhaustive, for a video sequential)",
    )
    parser.add_argument(
        "--camera-model",
        default="OPENCV",
        help="camera model of COLMAP, such as PINHOLE, SIMPLE_RADIAL or OPENCV (default: OPENCV)",
    )
    parser.add_argument(
        "--per-image-camera",
        action="store_true",
        help="use one camera per photograph (default: photographs of the same size share one)",
    )
    parser.add_argument(
        "--max-size",
        type=int,
        default=1600,
        help="shrink photographs whose longest side has more pixels (default: 1600)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the results of an earlier call in FOLDER")
    options = parser.parse_args(arguments)
    return in_one_line(lambda: _process(options))


def _process(given: argparse.Namespace) -> None:
    report = process(
        given.source,
        given.out,
        frames=given.frames,
        matching=given.matching,
        camera_model=given.camera_model,
        camera_per_image=given.per_image_camera,
        max_size=given.max_size,
        overwrite=given.overwrite,
    )
    for line in _told(report, given.out):
        logger.info("%s", line)


def _told(report: Report, folder: Path) -> list[str]:
    lines = [
        f"registered {report.registered} of {report.photographs} photographs",
        f"{report.points} points, on average seen in {report.mean_track_length:.1f} photographs, with a reprojection "
        f"error of {report.mean_reprojection_error:.2f} pixels",
    ]
    if report.unregistered:
        lines.append(f"not registered: {', '.join(report.unregistered)}")
    if report.other_models:
        others = " and ".join(map(str, report.other_models))
        lines.append(f"left out: smaller models of {others} photographs, which overlap too little with this one")
    if report.registered < _FEW * report.photographs:
        remedy = "take more in between" + (", or try --matching exhaustive" if report.matching == "sequential" else "")
        lines.append(f"many photographs were not registered: {remedy}")
    lines.append(f"wrote {folder} and {folder / REPORT}; look at it with `voxelfield inspect {folder}`")
    return lines
