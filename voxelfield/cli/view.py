"""Explore a trained field in a browser. Ctrl-C stops the viewer."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable

import voxelfield
from voxelfield.cli.scenes import add_run_arguments, load_scene_of
from voxelfield.installed import MissingPackageError
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.viewer.address import Address
from voxelfield.viewer.page import Photographs, ViewerPage, photographs_of

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_run_arguments(parser)
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    host = "address to listen on; 0.0.0.0 admits anyone who has the printed address with its token (default: 127.0.0.1)"
    parser.add_argument("--host", default="127.0.0.1", help=host)


def run(options: argparse.Namespace, wait: Callable[[ViewerPage], None] | None = None) -> None:
    """Serves the page until ``wait``, which is called with it, returns; None waits for Ctrl-C."""
    address = Address(options.host, options.port)
    address.check()
    trained = voxelfield.load(options.run, options.device)
    page = ViewerPage(address, trained, str(options.run), _photographs(trained, options))
    address.log_urls()
    try:
        if wait is None:
            threading.Event().wait()
        else:
            wait(page)
    finally:
        page.close()


def _photographs(run: TrainedModel, options: argparse.Namespace) -> Photographs:
    """Returns the photographs of the scene; if its files are not there, warns and returns none."""
    try:
        scene = load_scene_of(run, options, None)
    except (OSError, ValueError, MissingPackageError) as error:
        logger.warning("the scene's cameras and photographs are not shown: %s", error)
        return {}
    return photographs_of(scene, ("train", "val", "test"), run.cameras)
