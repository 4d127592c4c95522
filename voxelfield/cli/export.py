"""Write a trained field as a mesh, points, splats, a web page or a volume, its environment, and its scene's cameras.

At least one of the formats is needed. Files have the units and axes of the poses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import voxelfield
from voxelfield.cli.scenes import add_run_arguments, number
from voxelfield.export.registry import check_files, export, formats, options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_run_arguments(parser)
    files = parser.add_argument_group("formats")
    for name, each in formats().items():
        metavar = "FILE" if each.suffixes else "FOLDER"
        files.add_argument(f"--{name}", type=Path, metavar=metavar, help=_literal(each.help))
    group = parser.add_argument_group("options of formats")
    for users in options().values():
        option, texts = next(iter(users.values())), dict[str, list[str]]()
        for user, its in users.items():
            texts.setdefault(its.help, []).append(f"--{user}")
        if option.kind is bool:
            settings: dict[str, Any] = {"action": "store_true"}
        elif get_origin(option.kind) is Literal:
            settings = {"choices": get_args(option.kind)}
        else:
            kind, *limits = get_args(option.kind) or (option.kind,)
            settings = {"type": number(kind, limits[0]) if limits else kind, "metavar": option.metavar}
        text = "; ".join(f"{', '.join(flags)}: {text}" for text, flags in texts.items())
        group.add_argument(option.flag, default=argparse.SUPPRESS, help=_literal(text), **settings)


def _literal(text: str) -> str:
    """Returns a text of which argparse shows each character as it is."""
    return text.replace("%", "%%")


def run(given: argparse.Namespace) -> None:
    """Writes the requested files."""
    values = vars(given)
    files = {name: values[name] for name in formats() if values[name] is not None}
    chosen = {name: value for name, value in values.items() if name in options()}
    check_files(files, chosen)  # before the run is loaded
    trained = voxelfield.load(given.run, given.device)
    export(trained, files, root=given.data_root, missing_images=given.missing_images, **chosen)
