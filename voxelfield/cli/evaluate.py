"""``voxelfield eval``: compares a trained field with photographs of its scene."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from voxelfield.cli.errors import in_one_line
from voxelfield.cli.scenes import add_run_arguments, load_run_and_split
from voxelfield.files import atomic_write

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and evaluates; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="voxelfield eval", description="Compare a trained field with views of its scene: PSNR and SSIM."
    )
    add_run_arguments(parser)
    parser.add_argument("--split", default="test", help="whose views (default: test)")
    parser.add_argument("--views", type=int, help="judge so many views, spread evenly (default: all)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="write the rendered views there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, for each view too")
    options = parser.parse_args(arguments)
    return in_one_line(lambda: evaluate(options))


def evaluate(options: argparse.Namespace) -> None:
    """Evaluates as the command line asks.

    Raises:
        ValueError: An option makes no sense; the message names it.
        OSError: A file is not there or cannot be written.
    """
    if options.views is not None and options.views < 1:
        raise ValueError(f"--views must be at least 1, got {options.views}")
    run, split = load_run_and_split(options, options.split)
    found = run.evaluate(split, views=options.views, images=options.images)
    if options.json is not None:
        each = zip(found.names, found.psnr_per_view, found.ssim_per_view, strict=True)
        figures = {
            "psnr": found.psnr,
            "ssim": found.ssim,
            "drawn_by": run.backend,
            "views": {name: {"psnr": psnr, "ssim": ssim} for name, psnr, ssim in each},
        }
        with atomic_write(options.json) as file:
            file.write((json.dumps(figures, indent=1) + "\n").encode())
    logger.info("PSNR %.2f dB, SSIM %.4f over %d %s views", found.psnr, found.ssim, len(found.names), options.split)
