"""GPUs, the CUDA driver and the CUDA toolkit: which architectures to compile for, and which binaries run where."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("voxelfield.build")

# Machine code for these, where nvcc knows them. It runs on later GPUs of the same major version: code for 8.6 on 8.9
# (Ada), code for 12.0 on 12.1.
COMMON = ("75", "80", "86", "90", "100", "120")
# PTX for this architecture, or for the newest one before it that nvcc knows: the driver compiles it for 11.0, which is
# rare, and for future GPUs.
COMMON_PTX = "90"
OLDEST = (7, 5)
# Oldest Linux driver for binaries of each major version of CUDA (NVIDIA, "CUDA Compatibility", table 1).
OLDEST_DRIVER = {12: 525, 13: 580}

Capability = tuple[int, int]


def _capability(architecture: str) -> Capability:
    """``"86"`` -> (8, 6); ``"90a"`` -> (9, 0)."""
    digits = architecture.rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def _dotted(architecture: str) -> str:
    """``"86"`` -> ``"8.6"``, as TORCH_CUDA_ARCH_LIST writes it."""
    return re.sub(r"(\d)([af]?)$", r".\1\2", architecture)


class Architectures(NamedTuple):
    """Machine code and PTX of a CUDA binary, each for architectures as nvcc names them, such as ``"86"``."""

    sm: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()

    def run_on(self, capability: Capability) -> bool:
        """Returns whether a GPU of this compute capability can run the binary, possibly through the driver's compiler.

        Machine code runs on GPUs of its major version, with the same or a later minor version; PTX on all GPUs of the
        same or a later version. Code specific to an architecture (``90a``) runs on that one alone.
        """

        def serves(architecture: str, ptx: bool) -> bool:
            target = _capability(architecture)
            if not architecture.isdigit():
                return target == capability
            return target <= capability and (ptx or target[0] == capability[0])

        return any(serves(a, False) for a in self.sm) or any(serves(a, True) for a in self.ptx)

    def nvcc_flags(self) -> list[str]:
        """Returns nvcc's ``-gencode`` flags."""
        # 90a runs on the GPUs of 90, and adds products of warpgroups (wgmma).
        machine = dict.fromkeys("90a" if a == "90" else a for a in self.sm)
        return [f"-gencode=arch=compute_{a},code=sm_{a}" for a in machine] + [
            f"-gencode=arch=compute_{a},code=compute_{a}" for a in self.ptx
        ]

    def torch_list(self) -> str:
        """Returns the same as a value of ``TORCH_CUDA_ARCH_LIST``, such as ``"8.6;9.0+PTX"``.

        That variable asks for PTX only along with machine code, which is therefore in the list too.
        """
        names = [*self.sm, *(a for a in self.ptx if a not in self.sm)]
        return ";".join(_dotted(a) + ("+PTX" if a in self.ptx else "") for a in names)

    def __str__(self) -> str:
        """Returns text for messages, such as ``"compute capability 8.6, 9.0 and PTX of 9.0"``."""
        parts = [", ".join(_dotted(a) for a in self.sm)] if self.sm else []
        if self.ptx:
            parts.append("PTX of " + ", ".join(_dotted(a) for a in self.ptx))
        return "compute capability " + " and ".join(parts) if parts else "no GPU"


def parse_torch_list(text: str) -> Architectures:
    """Parses a value of ``TORCH_CUDA_ARCH_LIST``: ``"8.0;9.0+PTX"``, separated by semicolons, commas or spaces."""
    sm: set[str] = set()
    ptx: set[str] = set()
    for entry in re.split(r"[;,\s]+", text.strip()):
        found = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", entry)
        if found is None:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST must list compute capabilities such as '8.6;9.0+PTX', got {entry!r} in {text!r}"
            )
        (ptx if found[3] else sm).add(found[1] + found[2])
    return Architectures(*(tuple(sorted(names, key=_capability)) for names in (sm | ptx, ptx)))


def architectures_for(capabilities: Sequence[Capability], known: Collection[str]) -> Architectures:
    """Chooses the architectures: ``TORCH_CUDA_ARCH_LIST``, else those of the GPUs at hand, else the common ones.

    A GPU newer than nvcc gets PTX of the newest architecture that nvcc knows; ``known`` are those that it compiles for.
    """
    requested = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if requested and requested != "native":
        return parse_torch_list(requested)
    if not capabilities:
        sm = tuple(a for a in COMMON if a in known)
        return Architectures(sm, tuple(a for a in sm if _capability(a) <= _capability(COMMON_PTX))[-1:])
    supported = [c for c in capabilities if c >= OLDEST]
    names = sorted((a for a in known if a.isdigit()), key=_capability)
    usable = [[a for a in names if _capability(a) <= c] for c in supported]
    if not usable or not all(usable):
        gpus = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
        raise ValueError(f"this nvcc and voxelfield compile for GPUs of compute capability 7.5 or later, got {gpus}")
    exact = {f"{major}{minor}" for major, minor in supported} & set(names)
    newest = max((a[-1] for a in usable), key=_capability)
    return Architectures(tuple(sorted(exact, key=_capability)), (newest,))


def visible_capabilities() -> tuple[Capability, ...]:
    """Returns the compute capabilities of the GPUs that torch sees; none for a build of torch without CUDA."""
    import torch

    return tuple(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def driver_cuda() -> tuple[int, int]:
    """Returns the newest version of CUDA that the driver serves, such as (12, 8); (0, 0) without a driver."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return 0, 0
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def driver_complaint(cuda: int) -> str:
    """Returns why the driver cannot run binaries of a major version of CUDA, "" if it can.

    A binary links the CUDA runtime statically, so that the version of CUDA that torch runs on does not matter.
    """
    major, minor = driver_cuda()
    if major >= cuda:
        return ""
    served = f"this machine's driver serves CUDA {major}.{minor} at most" if major else "this machine has none"
    return f"needs a driver for CUDA {cuda} ({driver_for(cuda)}), but {served}"


def driver_for(cuda: int) -> str:
    """Names the oldest driver for a major version of CUDA, such as ``"version 580 or later"``."""
    return f"version {OLDEST_DRIVER[cuda]} or later" if cuda in OLDEST_DRIVER else f"that of CUDA {cuda} or later"


def find_cuda_home() -> Path | None:
    """Returns the root of the CUDA toolkit, from ``$CUDA_HOME``, ``$CUDA_PATH`` or the nvcc on the PATH; None without.

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
    """Returns the root of the CUDA toolkit; raises FileNotFoundError if there is none."""
    home = find_cuda_home()
    if home is None:
        raise FileNotFoundError("compiling the CUDA half needs nvcc: put it on the PATH or set CUDA_HOME")
    return home


def known_architectures(home: Path) -> set[str]:
    """Returns the architectures that a toolkit's nvcc compiles for, such as ``{"75", "80"}``."""
    return set(re.findall(r"^compute_(\d+)$", _ask_nvcc(home, "--list-gpu-arch"), re.MULTILINE))


def cuda_major(home: Path) -> int:
    """Returns the major version of a toolkit."""
    found = re.search(r"release (\d+)\.", _ask_nvcc(home, "--version"))
    if found is None:
        raise RuntimeError(f"{home / 'bin' / 'nvcc'} --version reports no release")
    return int(found[1])


def _ask_nvcc(home: Path, option: str) -> str:
    nvcc = home / "bin" / "nvcc"
    return subprocess.run([nvcc, option], capture_output=True, text=True, check=True).stdout
