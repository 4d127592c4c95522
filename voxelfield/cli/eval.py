"""Compare a trained field with views of its scene: PSNR, SSIM, LPIPS."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from voxelfield.cli.scenes import add_run_arguments, load_run_and_split, number
from voxelfield.config import Range
from voxelfield.evaluation.evaluation import write_table
from voxelfield.evaluation.metrics import check_lpips
from voxelfield.files import atomic_write

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add_run_arguments(parser)
    add("--split", default="test", help="split to evaluate: train, val or test (default: test)")
    add("--downscale", type=int, help="shrink images by this factor (default: to the run's image size)")
    add("--holdout", type=int, metavar="N", help="hold out every N-th view (default: as in the run)")
    add("--views", type=number(int, Range(1)), help="number of views to evaluate, evenly spread (default: all)")
    add("--lpips", action=argparse.BooleanOptionalAction, help="also compute LPIPS (default: as in the run)")
    add("--backend", metavar="NAME", help="render_view, or the fastest of the field (default)")
    add("--images", type=Path, metavar="DIR", help="write the rendered views to this folder")
    add("--json", type=Path, metavar="FILE", help="write the metrics, also of each view, to this file")
    add("--csv", type=Path, metavar="FILE", help="write a table of the views to this file")


def run(options: argparse.Namespace) -> None:
    """Evaluates the views, and writes the requested files."""
    if options.lpips:
        check_lpips()
    trained, split = load_run_and_split(options, options.split, downscale=options.downscale, holdout=options.holdout)
    evaluation = trained.evaluate(
        split, views=options.views, images=options.images, lpips=options.lpips, backend=options.backend
    )
    logger.info("%s over %d %s views of %s", evaluation, len(evaluation.names), options.split, split.size_in_words)
    drawn_by = trained.backend_for(split.cameras, options.backend)
    stored = drawn_by == trained.backend_for(split.cameras)
    cost = trained.baking_cost(split, evaluation) if stored else None
    if options.csv is not None:
        write_table(options.csv, evaluation)
    if options.json is not None:
        figures = {
            **evaluation.means(),
            "split": options.split,
            "views": len(evaluation.names),
            "drawn_by": drawn_by,
            **({} if cost is None else {"baking_cost": cost}),
            "per_view": evaluation.per_view(),
        }
        with atomic_write(options.json) as file:
            file.write((json.dumps(figures, indent=1) + "\n").encode())
