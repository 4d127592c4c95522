"""``voxelfield doctor``: what this machine has, and the first thing that fails."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence

import torch

from voxelfield import __version__, _build, _library, ops

# What `pip install voxelfield[train]` brings, by the name of the distribution.
TRAINING = ("numpy", "hydra-core", "tensorboard", "pillow", "safetensors", "imageio", "pooch", "tqdm")

Check = Callable[[], Iterator[tuple[str, str]]]


class DoctorError(RuntimeError):
    """Something that must work does not; the message says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, prints what is found; returns 1 if something fails that must work."""
    parser = argparse.ArgumentParser(
        prog="voxelfield doctor",
        description="Check this machine: versions, compilers, GPUs and their limits, and the kernels that serve them.",
    )
    parser.parse_args(arguments)
    for check in (versions, compilers, gpus, cpu_kernels, cuda_kernels, training):
        try:
            for name, found in check():
                print(f"{name:22} {found}")  # noqa: T201
        except (DoctorError, RuntimeError, OSError) as error:
            print(f"FAILED {check.__name__.replace('_', ' ')}: {error}")  # noqa: T201
            return 1
    print("all that is here works")  # noqa: T201
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Names the software."""
    yield "voxelfield", f"{__version__} in {_build.package_directory()}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield "torch", f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads"
    for variable in ("TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CXX", "TORCH_EXTENSIONS_DIR", "NVCC_APPEND_FLAGS"):
        if variable in os.environ:
            yield f"${variable}", os.environ[variable]


def compilers() -> Iterator[tuple[str, str]]:
    """Finds the compilers; they are needed only where no compiled kernels fit."""
    compiler = os.environ.get("CXX", "c++")
    yield "C++ compiler", shutil.which(compiler) or f"{compiler} is not on the PATH"
    home = _build.find_cuda_home()
    yield "CUDA toolkit", str(home) if home else "none: nvcc is not on the PATH"


def gpus() -> Iterator[tuple[str, str]]:
    """Describes each GPU that torch sees."""
    if not torch.cuda.is_available():
        yield "GPU", "none that torch can use"
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        shared = getattr(device, "shared_memory_per_block_optin", device.shared_memory_per_block)
        yield (
            f"GPU {index}",
            f"{device.name}, compute capability {device.major}.{device.minor}, {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB free, {shared} bytes of shared memory a block",
        )
        if (device.major, device.minor) < _build.OLDEST:
            major, minor = _build.OLDEST
            raise DoctorError(
                f"GPU {index} is older than compute capability {major}.{minor}, the oldest that is served"
            )


def cpu_kernels() -> Iterator[tuple[str, str]]:
    """Loads the CPU kernels, compiling them if need be, and samples a grid."""
    yield from _kernels("cpu", _build.CPU_MODULE)


def cuda_kernels() -> Iterator[tuple[str, str]]:
    """The same on each GPU."""
    if not torch.cuda.is_available():
        yield "CUDA kernels", "not needed without a GPU"
        return
    for index in range(torch.cuda.device_count()):
        yield from _kernels(f"cuda:{index}", _build.CUDA_MODULE)


def _kernels(device: str, module: str) -> Iterator[tuple[str, str]]:
    grid = torch.arange(2.0, device=device).view(2, 1, 1, 1).expand(2, 2, 2, 1).contiguous()
    middle = ops.sample_trilinear(grid, torch.full((1, 3), 0.5, device=device))
    path = _library.loaded_modules()[module]
    stamp = _build.read_stamp(path)
    served = f", for {stamp.architectures}" if stamp is not None and module == _build.CUDA_MODULE else ""
    yield f"kernels on {device}", f"{path}{served}"
    if middle.item() != 0.5:
        raise DoctorError(f"sampling between 0 and 1 on {device} must give 0.5, got {middle.item()}: run the tests")


def training() -> Iterator[tuple[str, str]]:
    """Looks for the packages that training needs."""
    absent = []
    for name in TRAINING:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        raise DoctorError(f'{", ".join(absent)} must be installed for training: pip install "voxelfield[train]"')
