"""``voxelfield build``: compiles the extension ahead of time instead of on first use.

It compiles the CPU half, and the CUDA half if there is nvcc and a GPU, into the folder that builds on first use also
write to. ``--only cpu`` or ``--only cuda`` selects one half, ``--out`` another folder.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from voxelfield import _build

HALVES = {"cpu": _build.sources.CPU_MODULE, "cuda": _build.sources.CUDA_MODULE}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and builds; returns the exit status."""
    parser = argparse.ArgumentParser(prog="voxelfield build", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the modules (default: that of builds on first use)")
    parser.add_argument(
        "--only", choices=sorted(HALVES), help="compile one half (default: CPU, and CUDA if a GPU is visible)"
    )
    parser.add_argument(
        "--objects", type=Path, help="keep object files here, so that only changed files are recompiled"
    )
    parser.add_argument("--werror", action="store_true", help="treat the compilers' warnings as errors")
    options = parser.parse_args(arguments)
    try:
        _build.sources.source_root()
    except FileNotFoundError as error:
        parser.exit(1, f"voxelfield build: {error}\n")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logger = logging.getLogger("voxelfield.build")
    if options.only:
        names, note = [HALVES[options.only]], ""
    else:
        names, note = _build.compiling.choose_modules()
    if note:
        logger.warning("voxelfield: %s", note)
    for name in names:
        directory = options.out or _build.compiling.module_directory(name)
        for path in _build.compiling.build([name], directory, options.objects, options.werror):
            logger.info("built %s", path)
    return 0
