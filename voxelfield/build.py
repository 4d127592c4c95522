"""Command line: compile ahead of time what would otherwise be compiled on first use.

``python -m voxelfield.build`` compiles the CPU half, and the CUDA half where nvcc is found, into the folder in which
just-in-time builds live; ``--out`` names another, ``--only cpu`` or ``--only cuda`` asks for one half.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from voxelfield import _build

HALVES = {"cpu": _build.CPU_MODULE, "cuda": _build.CUDA_MODULE}


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line and builds."""
    parser = argparse.ArgumentParser(prog="python -m voxelfield.build", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the modules (default: where just-in-time builds go)")
    parser.add_argument("--only", choices=sorted(HALVES), help="one half (default: CPU, and CUDA where nvcc is found)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    names = [HALVES[options.only]] if options.only else _build.module_names()
    for path in _build.build(names, options.out or _build.cache_directory()):
        logging.getLogger("voxelfield.build").info("built %s", path)


if __name__ == "__main__":
    main()
