"""Rewrite the report of a finished run: one HTML file with its metrics, curves, views, timing and settings.

The views are rendered again; the metrics are those of metrics.json.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from voxelfield.cli.scenes import add_run_arguments, load_run_and_split
from voxelfield.report.page import write_report
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.training.state.run_directory import METRICS

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_run_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: RUN/report.html)")


def run(options: argparse.Namespace) -> None:
    """Writes the report."""
    metrics = _read_metrics(options.run)
    trained, split = load_run_and_split(options, metrics.get("split", "test"))
    views = trained.trainer.evaluation.views
    thumbnails = Thumbnails(len(split) if views is None else min(views, len(split)))
    trained.evaluate(split, views=views, lpips=False, on_view=thumbnails.add)
    logger.info("wrote %s", write_report(options.run, metrics, trained.config, thumbnails, path=options.out))


def _read_metrics(directory: Path) -> dict[str, Any]:
    """Reads ``metrics.json`` of a finished run."""
    path = directory / METRICS
    if not directory.is_dir():
        raise ValueError(f"RUN must be a run directory, which holds the records of a run, got {directory}")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: RUN must be the directory of a finished run")
    try:
        metrics: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return metrics | {"psnr": float(metrics["psnr"]), "per_view": list(metrics["per_view"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must contain the metrics of a finished run ({error})") from error
