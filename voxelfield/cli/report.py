"""Rewrite the report of a finished run: one HTML file with its metrics, curves, views, timing and settings.

The views are rendered again; the metrics are read from metrics.json.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from voxelfield.cli.scenes import add_run_arguments, load_run_and_split
from voxelfield.messages import reason_of
from voxelfield.report.page import write_report
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.run_directory import METRICS, read_metrics

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_run_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: RUN/report.html)")


def run(options: argparse.Namespace) -> None:
    """Writes the report."""
    try:
        metrics = read_metrics(options.run)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"RUN must be the directory of a finished run, got {options.run}, which has no valid {METRICS}: "
            f"{reason_of(error)}"
        ) from error
    trained, split = load_run_and_split(options, metrics["split"])
    views = trained.trainer.evaluation.views
    thumbnails = Thumbnails(len(split) if views is None else min(views, len(split)))
    trained.evaluate(split, views=views, lpips=False, on_view=thumbnails.add)
    logger.info("wrote %s", write_report(options.run, metrics, trained.config, thumbnails, path=options.out))
