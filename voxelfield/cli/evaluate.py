"""``voxelfield eval``: compares a trained field with photographs of its scene."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from voxelfield.cli.errors import in_one_line
from voxelfield.cli.scenes import add_run_arguments, load_run_and_split
from voxelfield.evaluation.evaluation import write_table
from voxelfield.evaluation.lpips import check_lpips
from voxelfield.files import atomic_write

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and evaluates; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="voxelfield eval", description="Compare a trained field with views of its scene: PSNR, SSIM, LPIPS."
    )
    add_run_arguments(parser)
    parser.add_argument("--split", default="test", help="split to evaluate: train, val or test (default: test)")
    parser.add_argument("--downscale", type=int, help="shrink images by this factor (default: to the run's image size)")
    parser.add_argument("--holdout", type=int, metavar="N", help="hold out every N-th view (default: as in the run)")
    parser.add_argument("--views", type=int, help="number of views to evaluate, evenly spread (default: all)")
    parser.add_argument(
        "--lpips", action=argparse.BooleanOptionalAction, help="also compute LPIPS (default: as in the run)"
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="write the rendered views to this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the metrics, also of each view, to this file")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a table of the views to this file")
    options = parser.parse_args(arguments)
    return in_one_line(lambda: evaluate(options))


def evaluate(options: argparse.Namespace) -> None:
    """Evaluates as the command line asks.

    Raises:
        ValueError: An option makes no sense; the message names it.
        OSError: A file is not there or cannot be written.
        MissingPackageError: A package is not installed.
    """
    if options.views is not None and options.views < 1:
        raise ValueError(f"--views must be at least 1, got {options.views}")
    if options.lpips:
        check_lpips()
    run, split = load_run_and_split(options, options.split, downscale=options.downscale, holdout=options.holdout)
    found = run.evaluate(split, views=options.views, images=options.images, lpips=options.lpips)
    if options.csv is not None:
        write_table(options.csv, found)
    if options.json is not None:
        figures = {
            **found.means(),
            "split": options.split,
            "views": len(found.names),
            "drawn_by": run.backend,
            "per_view": found.per_view(),
        }
        with atomic_write(options.json) as file:
            file.write((json.dumps(figures, indent=1) + "\n").encode())
    logger.info("%s over %d %s views of %s", found, len(found.names), options.split, split.size_in_words)
