"""GPU architectures: which ones to compile for, and whether a binary runs on a GPU."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

# Machine code for these, where nvcc knows them. It runs on later GPUs of the same major version: 8.9 (Ada) runs that of
# 8.6, 12.1 that of 12.0.
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
    """What a CUDA binary holds: machine code and PTX, each for architectures as nvcc names them, such as ``"86"``."""

    sm: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()

    def run_on(self, capability: Capability) -> bool:
        """Tells whether a GPU of this compute capability has code here, as it is or through the driver's compiler.

        Machine code runs on the same major version from its own minor version on; PTX on everything as new or newer.
        What is specific to an architecture (``90a``) runs on that one alone.
        """

        def serves(architecture: str, ptx: bool) -> bool:
            own = _capability(architecture)
            if not architecture.isdigit():
                return own == capability
            return own <= capability and (ptx or own[0] == capability[0])

        return any(serves(a, False) for a in self.sm) or any(serves(a, True) for a in self.ptx)

    def nvcc_flags(self) -> list[str]:
        """Returns nvcc's ``-gencode`` flags."""
        return [f"-gencode=arch=compute_{a},code=sm_{a}" for a in self.sm] + [
            f"-gencode=arch=compute_{a},code=compute_{a}" for a in self.ptx
        ]

    def torch_list(self) -> str:
        """Returns the same as a value of ``TORCH_CUDA_ARCH_LIST``, such as ``"8.6;9.0+PTX"``.

        That variable asks for PTX only along with machine code, which is therefore in the list too.
        """
        names = [*self.sm, *(a for a in self.ptx if a not in self.sm)]
        return ";".join(_dotted(a) + ("+PTX" if a in self.ptx else "") for a in names)

    def folder(self) -> str:
        """Returns a name for a folder of such binaries, such as ``"sm86_sm90_ptx90"``."""
        return "_".join([f"sm{a}" for a in self.sm] + [f"ptx{a}" for a in self.ptx])

    def __str__(self) -> str:
        """Returns words for messages, such as ``"compute capability 8.6, 9.0 and PTX of 9.0"``."""
        parts = [", ".join(_dotted(a) for a in self.sm)] if self.sm else []
        if self.ptx:
            parts.append("PTX of " + ", ".join(_dotted(a) for a in self.ptx))
        return "compute capability " + " and ".join(parts) if parts else "no GPU"


def parse_torch_list(text: str) -> Architectures:
    """Parses a value of ``TORCH_CUDA_ARCH_LIST``: ``"8.0;9.0+PTX"``, separated by semicolons, commas or spaces.

    Raises:
        ValueError: An entry is not a compute capability.
    """
    sm: list[str] = []
    ptx: list[str] = []
    for entry in re.split(r"[;,\s]+", text.strip()):
        found = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", entry)
        if found is None:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST must list compute capabilities such as '8.6;9.0+PTX', got {entry!r} in {text!r}"
            )
        sm.append(found[1] + found[2])
        if found[3]:
            ptx.append(found[1] + found[2])
    return Architectures(*(tuple(sorted(set(names), key=_capability)) for names in (sm, ptx)))


def architectures_for(capabilities: Sequence[Capability], known: Collection[str]) -> Architectures:
    """Chooses the architectures: ``TORCH_CUDA_ARCH_LIST``, else those of the GPUs at hand, else the common ones.

    Args:
        capabilities: Compute capabilities of the GPUs to serve; may be empty.
        known: Architectures that the toolkit's nvcc compiles for, such as ``{"75", "80"}``.

    Returns:
        The architectures. A GPU newer than nvcc gets PTX of the newest architecture that nvcc knows.

    Raises:
        ValueError: ``TORCH_CUDA_ARCH_LIST`` is malformed, or nvcc compiles for none of the GPUs.
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


@functools.cache
def visible_capabilities() -> tuple[Capability, ...]:
    """Returns the compute capabilities of the GPUs that CUDA's driver shows to this process, one for each.

    It asks the driver itself, so that it needs no CUDA build of torch and follows ``CUDA_VISIBLE_DEVICES``.
    """
    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple((_attribute(driver, device, 75), _attribute(driver, device, 76)) for device in range(count.value))


def driver_cuda() -> tuple[int, int]:
    """Returns the newest version of CUDA that the driver serves, such as (12, 8); (0, 0) without a driver."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def driver_complaint(cuda: int) -> str:
    """Says that the driver is too old for binaries of a major version of CUDA, in words that follow their name.

    A binary links the CUDA runtime statically, so that the version of CUDA that torch runs on does not matter.

    Returns:
        The words; "" if the driver is new enough.
    """
    major, minor = driver_cuda()
    if major >= cuda:
        return ""
    served = f"this machine's driver serves CUDA {major}.{minor} at most" if major else "this machine has none"
    return f"needs a driver for CUDA {cuda} ({driver_for(cuda)}), but {served}"


def driver_for(cuda: int) -> str:
    """Names the oldest driver for a major version of CUDA, such as ``"version 580 or later"``."""
    return f"version {OLDEST_DRIVER[cuda]} or later" if cuda in OLDEST_DRIVER else f"that of CUDA {cuda} or later"


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return None


def _attribute(driver: ctypes.CDLL, ordinal: int, attribute: int) -> int:
    """Reads CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR (75) or _MINOR (76)."""
    device, value = ctypes.c_int(), ctypes.c_int()
    if (
        driver.cuDeviceGet(ctypes.byref(device), ordinal) != 0
        or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0
    ):
        raise RuntimeError(f"the CUDA driver does not report the compute capability of GPU {ordinal}")
    return value.value
