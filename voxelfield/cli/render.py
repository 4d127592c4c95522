"""``voxelfield render``: draws an orbit around a trained field."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from voxelfield.cli.errors import in_one_line
from voxelfield.cli.scenes import add_run_arguments, load_run_and_split
from voxelfield.rendering.cameras import orbit
from voxelfield.training.png import PngWriter
from voxelfield.training.video import video_frames, write_video

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and renders; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="voxelfield render",
        description="Draw a circle around a trained field, at the mean distance and height of its training cameras.",
    )
    add_run_arguments(parser)
    parser.add_argument("--frames", type=int, default=120, help="number of frames (default: 120)")
    parser.add_argument(
        "--out", type=Path, default=Path("orbit.mp4"), help="a video, *.mp4, or a folder for PNGs (default: orbit.mp4)"
    )
    options = parser.parse_args(arguments)
    return in_one_line(lambda: render(options))


def render(options: argparse.Namespace) -> None:
    """Renders as the command line asks.

    Raises:
        ValueError: An option makes no sense; the message names it.
        OSError: A file is not there or cannot be written.
    """
    if options.frames < 1:
        raise ValueError(f"--frames must be at least 1, got {options.frames}")
    if options.out.suffix not in ("", ".mp4"):
        raise ValueError(f"--out must be a file *.mp4 or a folder, got {options.out}")
    run, split = load_run_and_split(options, "train")
    cameras = orbit(split.cameras, run.field.aabb.mean(dim=0).cpu(), options.frames)
    views = run.render_path(cameras)
    if options.out.suffix == ".mp4":
        write_video(options.out, video_frames(views))
    else:
        with PngWriter() as frames:
            for index, view in enumerate(views):
                frames.save(options.out / f"{index:04d}.png", view.rgb)
    logger.info("wrote %d frames to %s", options.frames, options.out)
