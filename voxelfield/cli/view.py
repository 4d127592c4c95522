"""``voxelfield view``: serves a page on which a trained field can be walked through."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import voxelfield
from voxelfield.cli.errors import in_one_line
from voxelfield.cli.scenes import add_run_arguments, load_scene_of
from voxelfield.installed import MissingPackageError
from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.curves import Curves, read_curves
from voxelfield.viewer.drawing.look import Look
from voxelfield.viewer.drawing.painter import Painter, content_boxes, reference_of
from voxelfield.viewer.drawing.photographs import Photographs
from voxelfield.viewer.page.address import Address, import_viser
from voxelfield.viewer.page.viewer_page import ViewerPage
from voxelfield.viewer.scheduling.source import FinishedRun

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and serves until Ctrl-C; returns the exit status."""
    options = parser().parse_args(arguments)
    return in_one_line(lambda: view(options))


def parser() -> argparse.ArgumentParser:
    """Returns what parses the command line."""
    parser = argparse.ArgumentParser(
        prog="voxelfield view", description="Explore a trained field in a browser. Ctrl-C stops the viewer."
    )
    add_run_arguments(parser)
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 admits whoever has the printed address with its token (default: 127.0.0.1)",
    )
    return parser


def view(options: argparse.Namespace, wait: Callable[[ViewerPage], None] | None = None) -> None:
    """Serves as the command line asks.

    Args:
        options: The parsed command line.
        wait: Is given the page, which is closed when it returns; None waits for Ctrl-C.

    Raises:
        ValueError: An option makes no sense; the message names it.
        OSError: The run is not there.
        MissingPackageError: viser is not installed.
    """
    import_viser()
    address = Address(options.host, options.port)
    address.check()
    run = voxelfield.load(options.run, options.device)
    page = ViewerPage(
        address,
        run.config.scene.name,
        str(options.run),
        FinishedRun(run),
        _photographs(run, options),
        content_boxes(run),
        run.model.background.cpu(),
        _curves(options.run),
        reference=reference_of(run.field.warp),
    )
    address.tell()
    absence = Painter(run).absence(page.stage.home(), Look())
    if absence:
        logger.warning("first view of %s: %s", options.run, absence)
    try:
        if wait is None:
            threading.Event().wait()
        else:
            wait(page)
    finally:
        page.close()


def _photographs(run: TrainedModel, options: argparse.Namespace) -> Photographs:
    """Returns the photographs of a run's scene; none, and a line that says so, where its files are not there."""
    try:
        scene = load_scene_of(run, options, None)
    except (OSError, ValueError, MissingPackageError) as error:
        logger.warning("the scene's cameras and photographs are not shown: %s", error)
        return Photographs({})
    return Photographs.of(scene, ("train", "val", "test"), run.cameras)


def _curves(path: Path) -> Curves:
    """Returns what a run has logged, read in the background."""
    curves = Curves()
    folder = path if path.is_dir() else path.parent
    threading.Thread(target=read_curves, args=(folder, curves), name="viewer curves", daemon=True).start()
    return curves
