"""``voxelfield doctor``: reports the machine's software and hardware, and the first check that fails."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence

import torch

from voxelfield import __version__, _build, _library, ops
from voxelfield.cli.packages import HOW_TO_INSTALL, TRAINING_PACKAGES

# Variables of others by which the extension is compiled; voxelfield's own are known by their prefix.
_BUILD_VARIABLES = (
    "TORCH_CUDA_ARCH_LIST",
    "CUDA_HOME",
    "CUDA_PATH",
    "CXX",
    "TORCH_EXTENSIONS_DIR",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
)
_SHARED_MEMORY_VARIABLE = "VOXELFIELD_SHARED_MEMORY_LIMIT"

SHARED_MEMORY = {
    "density network backward": 65_792,
    "colour network forward": 84_224,
    "colour network backward": 205_056,
    "render_pyramid_image": 184_832,
}
"""Bytes of shared memory per block with which launches of the default model keep its networks there.

Where a GPU allows less, another form takes over, which reads part of that from global memory. Launches that fit every
GPU are left out. The launches themselves plan with ``extension/mlp/plan.h`` and ``extension/fields/pyramid_plan.h``, by
which a test checks these numbers.
"""

Check = Callable[[], Iterator[tuple[str, str]]]


class DoctorError(RuntimeError):
    """A required component does not work; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, prints what is found; returns 1 if something fails that must work."""
    parser = argparse.ArgumentParser(
        prog="voxelfield doctor",
        description="Check this machine: versions, compilers, GPUs and their limits, and the compiled kernels.",
    )
    parser.parse_args(arguments)
    for check in (versions, packaged_kernels, compilers, gpus, cpu_kernels, cuda_kernels, training):
        try:
            for name, found in check():
                print(f"{name:22} {found}")  # noqa: T201
        except (DoctorError, RuntimeError, OSError) as error:
            print(f"FAILED {check.__name__.replace('_', ' ')}: {error}")  # noqa: T201
            return 1
    print("all checks passed")  # noqa: T201
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Names the software."""
    yield "voxelfield", f"{__version__} in {_build.sources.package_directory()}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield "torch", f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads"
    own = sorted(variable for variable in os.environ if variable.startswith("VOXELFIELD_"))
    for variable in (*_BUILD_VARIABLES, *own):
        if variable in os.environ:
            yield f"${variable}", os.environ[variable]


def packaged_kernels() -> Iterator[tuple[str, str]]:
    """Tells which halves came with the package, and what for."""
    for name in (_build.sources.CPU_MODULE, _build.sources.CUDA_MODULE):
        modules = _library.modules_in(_build.sources.package_directory(), name)
        yield f"{name} in the package", str(_build.sources.read_stamp(modules[0])) if modules else "none"


def compilers() -> Iterator[tuple[str, str]]:
    """Finds the compilers; they are needed only where no compiled kernels fit."""
    if not _build.sources.has_sources():
        yield "compilers", "not used: this voxelfield was installed from a wheel of compiled kernels"
        return
    compiler = os.environ.get("CXX", "c++")
    yield "C++ compiler", shutil.which(compiler) or f"{compiler} is not on the PATH"
    home = _build.architectures.find_cuda_home()
    yield "CUDA toolkit", str(home) if home else "none: nvcc is not on the PATH"


def gpus() -> Iterator[tuple[str, str]]:
    """Describes each GPU that torch sees, and how the default model's networks run on it."""
    if not torch.cuda.is_available():
        yield "GPU", "none that torch can use"
        return
    cap = _shared_memory_cap()
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        shared = getattr(device, "shared_memory_per_block_optin", device.shared_memory_per_block)
        yield (
            f"GPU {index}",
            f"{device.name}, compute capability {device.major}.{device.minor}, {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free, {shared} bytes of shared memory per block",
        )
        if (device.major, device.minor) < _build.architectures.OLDEST:
            major, minor = _build.architectures.OLDEST
            raise DoctorError(
                f"GPU {index} must have compute capability {major}.{minor} or later, got {device.major}.{device.minor}"
            )
        yield from _network_forms(index, shared if cap is None else min(shared, cap))


def _shared_memory_cap() -> int | None:
    """Returns the bytes per block that the environment allows the kernels, None if it says nothing of them."""
    text = os.environ.get(_SHARED_MEMORY_VARIABLE)
    if text is None:
        return None
    cap = int(text) if text.isdecimal() else 0
    if not 0 < cap < 2**31:
        raise DoctorError(f"{_SHARED_MEMORY_VARIABLE} must be a positive number of bytes, got {text!r}")
    return cap


def _network_forms(index: int, limit: int) -> Iterator[tuple[str, str]]:
    """Tells which launches of the default model a GPU's shared memory serves, and which read global memory instead."""
    fitting = [name for name, taken in SHARED_MEMORY.items() if taken <= limit]
    others = [name for name in SHARED_MEMORY if name not in fitting]
    for form, names in (
        ("networks in shared memory", fitting),
        (f"networks partly in global memory, as a block may use {limit} bytes", others),
    ):
        if names:
            listed = ", ".join(f"{name} ({SHARED_MEMORY[name]} bytes)" for name in names)
            yield f"model=pyramid on GPU {index}", f"{form}: {listed}"


def cpu_kernels() -> Iterator[tuple[str, str]]:
    """Loads the CPU kernels, compiling them if need be, and samples a grid."""
    yield from _kernels("cpu", _build.sources.CPU_MODULE)
    yield _build_flags(_build.sources.CPU_MODULE)


def cuda_kernels() -> Iterator[tuple[str, str]]:
    """The same on each GPU."""
    if not torch.cuda.is_available():
        yield "CUDA kernels", "not needed without a GPU"
        return
    for index in range(torch.cuda.device_count()):
        yield from _kernels(f"cuda:{index}", _build.sources.CUDA_MODULE)
    yield _build_flags(_build.sources.CUDA_MODULE)


def _kernels(device: str, module: str) -> Iterator[tuple[str, str]]:
    grid = torch.arange(2.0, device=device).view(2, 1, 1, 1).expand(2, 2, 2, 1).contiguous()
    middle = ops.sample_trilinear(grid, torch.full((1, 3), 0.5, device=device))
    yield f"kernels on {device}", str(_library.loaded_modules()[module])
    if middle.item() != 0.5:
        raise DoctorError(f"sampling between 0 and 1 on {device} must give 0.5, got {middle.item()}: run the tests")


def _build_flags(module: str) -> tuple[str, str]:
    """Tells what a loaded module says that it was compiled from and with."""
    return f"{module} compiled from", str(_build.sources.read_stamp(_library.loaded_modules()[module]))


def training() -> Iterator[tuple[str, str]]:
    """Looks for the packages that training needs."""
    absent = []
    for name in dict.fromkeys(TRAINING_PACKAGES.values()):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        raise DoctorError(f"{', '.join(absent)} must be installed for training: {HOW_TO_INSTALL}")
