"""``voxelfield build``: compiles ahead of time what the first use of an op would compile.

It compiles the CPU half, and the CUDA half where there is nvcc and a GPU, into the folder in which builds on first use
live. ``--only cpu`` or ``--only cuda`` asks for one half, ``--out`` names another folder.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from voxelfield import _build

HALVES = {"cpu": _build.CPU_MODULE, "cuda": _build.CUDA_MODULE}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and builds; returns the exit status."""
    parser = argparse.ArgumentParser(prog="voxelfield build", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the modules (default: where builds on first use go)")
    parser.add_argument("--only", choices=sorted(HALVES), help="one half (default: CPU, and CUDA for a visible GPU)")
    parser.add_argument("--objects", type=Path, help="keep object files here, to recompile only what changed later")
    parser.add_argument("--werror", action="store_true", help="treat the compilers' warnings as errors")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logger = logging.getLogger("voxelfield.build")
    if options.only:
        names, note = [HALVES[options.only]], ""
    else:
        names, note = _build.choose_modules()
    if note:
        logger.warning("voxelfield: %s", note)
    for name in names:
        directory = options.out or _build.module_directory(name)
        for path in _build.build([name], directory, options.objects, options.werror):
            logger.info("built %s", path)
    return 0
