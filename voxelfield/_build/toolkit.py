"""Finding the CUDA toolkit and asking its nvcc."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

logger = logging.getLogger("voxelfield.build")


def find_cuda_home() -> Path | None:
    """Returns the root of the CUDA toolkit: ``$CUDA_HOME``, ``$CUDA_PATH``, or that of the nvcc on the PATH; else None.

    A variable that names a folder without nvcc, such as one left behind by a removed toolkit, is ignored with a
    warning.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            if shutil.which("nvcc", path=str(Path(value) / "bin")) is not None:
                return Path(value)
            logger.warning("ignoring %s=%s: there is no bin/nvcc in it", variable, value)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    # The nvcc on the PATH may be a link or a wrapper script; only nvcc itself knows its toolkit.
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else Path(nvcc).resolve().parent.parent


def require_cuda_home() -> Path:
    """Returns the root of the CUDA toolkit.

    Raises:
        FileNotFoundError: There is none.
    """
    home = find_cuda_home()
    if home is None:
        raise FileNotFoundError("compiling the CUDA half needs nvcc: put it on the PATH or set CUDA_HOME")
    return home


def known_architectures(home: Path) -> set[str]:
    """Returns the architectures that a toolkit's nvcc compiles for, such as ``{"75", "80"}``."""
    listed = _ask_nvcc(home, "--list-gpu-arch")
    return {found[1] for line in listed.split() if (found := re.fullmatch(r"compute_(\d+)", line))}


def cuda_major(home: Path) -> int:
    """Returns the major version of a toolkit."""
    found = re.search(r"release (\d+)\.", _ask_nvcc(home, "--version"))
    if found is None:
        raise RuntimeError(f"{home / 'bin' / 'nvcc'} --version reports no release")
    return int(found[1])


def _ask_nvcc(home: Path, option: str) -> str:
    nvcc = home / "bin" / "nvcc"
    return subprocess.run([nvcc, option], capture_output=True, text=True, check=True).stdout
