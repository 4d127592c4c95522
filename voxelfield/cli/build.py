"""Compile the extension ahead of time instead of on first use.

It compiles the CPU half, and the CUDA half if there is nvcc and a GPU, into the folder that builds on first use also
write to.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from voxelfield import _build

HALVES = {"cpu": _build.sources.CPU_MODULE, "cuda": _build.sources.CUDA_MODULE}

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--out", type=Path, help="folder for the modules (default: that of builds on first use)")
    add("--only", choices=sorted(HALVES), help="compile one half (default: CPU, and CUDA if a GPU is visible)")
    add("--objects", type=Path, help="keep object files here, so that only changed files are recompiled")
    add("--werror", action="store_true", help="treat the compilers' warnings as errors")


def run(options: argparse.Namespace) -> None:
    """Compiles the modules."""
    _build.sources.source_root()  # raises FileNotFoundError if there are no sources
    names, note = ([HALVES[options.only]], "") if options.only else _build.compiling.choose_modules()
    if note:
        logger.warning("voxelfield: %s", note)
    for name in names:
        directory = options.out or _build.compiling.module_directory(name)
        logger.info("built %s", _build.compiling.build(name, directory, options.objects, options.werror))
