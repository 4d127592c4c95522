"""Write a trained field as a mesh, points, splats, a web page or a volume, its environment, and its scene's cameras.

At least one of the formats is needed. Files have the units and axes of the poses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import voxelfield
from voxelfield.cli.scenes import add_run_arguments, number
from voxelfield.export.registry import check_files, export, formats, options_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_run_arguments(parser)
    files = parser.add_argument_group("formats")
    for name, each in formats().items():
        files.add_argument(f"--{name}", type=Path, metavar="FILE" if each.suffixes else "FOLDER", help=each.help)
    group = parser.add_argument_group("options of formats")
    for option, users in options_of(formats()).values():
        settings: dict[str, object] = {"action": "store_true"}
        if option.kind is not bool:
            kind = option.kind if option.allowed is None else number(option.kind, option.allowed)
            settings = {"type": kind, "choices": option.choices or None, "metavar": option.metavar}
        text = f"{', '.join(f'--{user}' for user in users)}: {option.help}"
        group.add_argument(option.flag, default=argparse.SUPPRESS, help=text, **settings)  # type: ignore[arg-type]


def run(options: argparse.Namespace) -> None:
    """Writes the requested files."""
    files = {name: path for name in formats() if (path := getattr(options, name)) is not None}
    given = {name: value for name, value in vars(options).items() if name in options_of(formats())}
    check_files(files, given)  # before the run is loaded
    trained = voxelfield.load(options.run, options.device)
    export(trained, files, root=options.data_root, missing_images=options.missing_images, **given)
