"""``voxelfield report``: writes the report of a finished run again."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from voxelfield.cli.errors import in_one_line
from voxelfield.cli.scenes import add_run_arguments, load_run_and_split
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.report.writing import write_report
from voxelfield.training.state.run_directory import METRICS

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and writes; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="voxelfield report",
        description="Rewrite the report of a finished run: one HTML file with its metrics, curves, views, timing and "
        "settings. The views are rendered again; the metrics are those of metrics.json.",
    )
    add_run_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: RUN/report.html)")
    options = parser.parse_args(arguments)
    return in_one_line(lambda: report(options))


def report(options: argparse.Namespace) -> None:
    """Writes the report as the command line asks.

    Raises:
        ValueError: RUN is not a run directory, or its metrics are damaged.
        OSError: A file is not there or cannot be written.
    """
    metrics = read_metrics(options.run)
    run, split = load_run_and_split(options, metrics.get("split", "test"))
    views = run.trainer.evaluation.views
    thumbnails = Thumbnails(len(split) if views is None else min(views, len(split)))
    run.evaluate(split, views=views, lpips=False, on_view=thumbnails.add)
    logger.info("wrote %s", write_report(options.run, metrics, run.config, thumbnails, path=options.out))


def read_metrics(directory: Path) -> dict[str, Any]:
    """Reads what a finished run found.

    Args:
        directory: Run directory.

    Raises:
        ValueError: The path is not a directory, or the file there is damaged.
        FileNotFoundError: The run has not finished.
    """
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
