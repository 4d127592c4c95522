"""``voxelfield view``: serves a page on which a trained field can be walked through."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable, Sequence

import voxelfield
from voxelfield.cli.errors import in_one_line
from voxelfield.cli.scenes import add_run_arguments, load_scene_of
from voxelfield.installed import MissingPackageError
from voxelfield.training.trained_model import TrainedModel
from voxelfield.viewer.address import Address, import_viser
from voxelfield.viewer.page import ViewerPage
from voxelfield.viewer.photographs import Photographs

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and serves until Ctrl-C; returns the exit status."""
    options = parser().parse_args(arguments)
    return in_one_line(lambda: view(options))


def parser() -> argparse.ArgumentParser:
    """Returns the argument parser."""
    parser = argparse.ArgumentParser(
        prog="voxelfield view", description="Explore a trained field in a browser. Ctrl-C stops the viewer."
    )
    add_run_arguments(parser)
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 admits anyone who has the printed address with its token "
        "(default: 127.0.0.1)",
    )
    return parser


def view(options: argparse.Namespace, wait: Callable[[ViewerPage], None] | None = None) -> None:
    """Serves the page.

    Args:
        options: The parsed command line.
        wait: Called with the page, which is closed when it returns; None waits for Ctrl-C.

    Raises:
        ValueError: An option is invalid; the message names it.
        OSError: The run does not exist.
        MissingPackageError: viser is not installed.
    """
    import_viser()
    address = Address(options.host, options.port)
    address.check()
    run = voxelfield.load(options.run, options.device)
    page = ViewerPage(address, run, str(options.run), _photographs(run, options))
    address.log_urls()
    try:
        if wait is None:
            threading.Event().wait()
        else:
            wait(page)
    finally:
        page.close()


def _photographs(run: TrainedModel, options: argparse.Namespace) -> Photographs:
    """Returns the photographs of a run's scene, or logs why there are none."""
    try:
        scene = load_scene_of(run, options, None)
    except (OSError, ValueError, MissingPackageError) as error:
        logger.warning("the scene's cameras and photographs are not shown: %s", error)
        return Photographs({})
    return Photographs.of(scene, ("train", "val", "test"), run.cameras)
