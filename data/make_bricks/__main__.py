"""The command line: ``python -m make_bricks`` in the folder that holds this package renders both splits of the scene.

Mitsuba is needed for this alone, never for training::

    pip install mitsuba pillow numpy                             # Mitsuba 3.9 made the committed images
    python -m make_bricks                                        # the committed images: 200x200 pixels
    python -m make_bricks --size 800 --spp 256 --out bricks_800  # the same cameras, finer images
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from make_bricks.cameras import hemisphere_cameras, orbit_cameras
from make_bricks.dataset import write_dataset


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m make_bricks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "bricks", help="folder to write")
    parser.add_argument("--size", type=int, default=200, help="side of the images in pixels")
    parser.add_argument("--spp", type=int, default=144, help="samples per pixel")
    parser.add_argument(
        "--views",
        type=int,
        nargs=2,
        default=(100, 25),
        metavar=("TRAIN", "TEST"),
        help="number of views; the cameras depend on it",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that render, of one thread each")
    return parser.parse_args()


def main() -> None:
    """Renders both splits."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments()
    train, test = arguments.views
    splits = {"train": hemisphere_cameras(train), "test": orbit_cameras(test)}
    write_dataset(arguments.out, splits, arguments.size, arguments.spp, arguments.jobs)


if __name__ == "__main__":
    main()
