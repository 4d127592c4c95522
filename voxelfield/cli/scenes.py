"""The verbs that get scenes and look at them, ``download``, ``process`` and ``inspect``, and ``runs``, a list of runs.

The packages that ``process`` and ``inspect`` need are imported where they run, because ``download`` needs none of them.
"""

from __future__ import annotations

import argparse
import logging
import shlex
from datetime import datetime
from pathlib import Path

from voxelfield.datasets.download import download, downloadable_scenes
from voxelfield.files import size_on_disk
from voxelfield.messages import one_line
from voxelfield.run_directory import METRICS, runs_folder, runs_in

logger = logging.getLogger(__name__)

# Below this fraction of the photographs, something about the capture or the settings is likely wrong.
_FEW = 0.8


def add_download_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("scene", help=f"one of: {', '.join(downloadable_scenes())}")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of scenes (default: data)")
    parser.add_argument("--url", action="append", help="zip archive to try instead of the public ones; may be repeated")


def run_download(options: argparse.Namespace) -> None:
    """Fetch a public scene."""
    download(options.scene, options.root, options.url)


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("source", type=Path, metavar="PHOTOS_OR_VIDEO", help="a folder of photographs, or a video")
    add("-o", "--out", dest="folder", type=Path, required=True, metavar="FOLDER", help="the scene's folder")
    sharpest = "number of frames to take from a video, the sharpest of each equal part (default: 120)"
    add("--frames", type=int, default=120, help=sharpest)
    matching = "match all photographs, or neighbours by name or GPS (default: exhaustive, for a video sequential)"
    add("--matching", choices=("exhaustive", "sequential", "spatial"), help=matching)
    mapper = "find poses one after another, or all at once (default: incremental)"
    add("--mapper", choices=("incremental", "global"), default="incremental", help=mapper)
    rig = "photographs of a rig, with a subfolder per camera and the same names in each; needs --mapper global"
    add("--rig", action="store_true", help=rig)
    model = "camera model of COLMAP, such as PINHOLE, SIMPLE_RADIAL or OPENCV (default: OPENCV)"
    add("--camera-model", default="OPENCV", help=model)
    shared = "use one camera per photograph (default: photographs of the same size share one)"
    add("--per-image-camera", dest="camera_per_image", action="store_true", help=shared)
    side = "shrink photographs whose longest side has more pixels (default: 1600)"
    add("--max-size", type=int, default=1600, help=side)
    add("--overwrite", action="store_true", help="replace the results of an earlier call in FOLDER")


def run_process(options: argparse.Namespace) -> None:
    """Find the poses of photographs, or of frames of a video, and write a scene for training."""
    from voxelfield.captures.processing import REPORT, process

    report, folder = process(**vars(options)), options.folder
    logger.info("registered %d of %d photographs", report.registered, report.photographs)
    logger.info(
        "%d points, on average seen in %.1f photographs, with a reprojection error of %.2f pixels",
        *(report.points, report.mean_track_length, report.mean_reprojection_error),
    )
    for cause in dict.fromkeys(report.unregistered.values()):
        names = [name for name, its in report.unregistered.items() if its == cause]
        logger.info("not registered, %s: %s", cause, ", ".join(names))
    if report.other_models:
        others = " and ".join(map(str, report.other_models))
        logger.info("left out: smaller models of %s photographs, which overlap too little with this one", others)
    if report.registered < _FEW * report.photographs:
        remedy = "take more in between" + (", or try --matching exhaustive" if report.matching == "sequential" else "")
        logger.info("many photographs were not registered: %s", remedy)
    logger.info("wrote %s and %s", folder, folder / REPORT)
    logger.info("next: `voxelfield inspect %s`, then `voxelfield train %s`", *2 * [shlex.quote(str(folder))])


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    from voxelfield.captures.inspection import PAGE, PICTURE

    add = parser.add_argument
    add("scene", metavar="FOLDER", help="folder or name of the scene")
    add("-o", "--out", type=Path, help=f"folder for {PICTURE} and {PAGE} (default: the current folder)")
    add("--data-root", type=Path, default=Path("data"), help="folder of scenes given by name (default: data)")
    add("--model", type=int, metavar="N", help="COLMAP model sparse/N (default: that with the most photographs)")


def run_inspect(options: argparse.Namespace) -> None:
    """Draw a scene's cameras, box and points, show its images on a page, and warn of common problems."""
    from voxelfield.captures.inspection import PAGE, PICTURE, inspect_scene
    from voxelfield.datasets.loading import configured_box, scene_of

    folder, out = scene_of(options.scene, options.data_root).folder, options.out or Path()
    rows, findings = inspect_scene(folder, out, configured_box(options.scene), options.model)
    for label, text in rows:
        logger.info("%-34s %s", label, text)
    for finding in findings:
        logger.warning("warning: %s: %s", finding.title, finding.message)
    logger.info("wrote %s and %s", out / PICTURE, out / PAGE)


def add_runs_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    text = "where to look for runs (default: %(default)s)"
    parser.add_argument("folder", nargs="?", type=Path, default=runs_folder(), metavar="FOLDER", help=text)


def run_runs(options: argparse.Namespace) -> None:
    """List the finished runs in a folder and its subfolders, the latest at the end, and name the other runs there."""
    finished, others = runs_in(options.folder)
    rows = [("scene", "PSNR", "seconds", "MiB", "date", "folder")]
    for directory, metrics in finished.items():
        scene, folder = one_line(metrics["scene"]), one_line(str(directory))
        size = size_on_disk(directory) / 2**20
        date = datetime.fromtimestamp((directory / METRICS).stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        rows.append((scene, f"{metrics['psnr']:.2f}", f"{metrics['train_seconds']:.1f}", f"{size:.1f}", date, folder))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for scene, *cells, folder in rows:
        print("  ".join((scene.ljust(widths[0]), *map(str.rjust, cells, widths[1:]), folder)))  # noqa: T201
    for other in others or ([] if finished else [f"there are no runs in {options.folder}"]):
        logger.warning("%s", other)
