"""The verbs that need no scene: ``doctor``, ``build`` and ``bench``."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from voxelfield import __version__, _build, _library, ops
from voxelfield.cli.command import TRAINING_PACKAGES
from voxelfield.devices import choose_device

logger = logging.getLogger(__name__)

HALVES = {"cpu": _build.sources.CPU_MODULE, "cuda": _build.sources.CUDA_MODULE}

# Of the grid, and the duration of each measurement of ``bench``.
_CHANNELS, _SECONDS = 4, 0.5

# Beginnings of the names of environment variables that matter to voxelfield or to its compilation.
_VARIABLES = ("VOXELFIELD_", "TORCH_CUDA_ARCH_LIST", "TORCH_EXTENSIONS_DIR", "CUDA_HOME", "CUDA_PATH", "NVCC_", "CXX")

EXTRAS = dict.fromkeys(TRAINING_PACKAGES.values(), "train") | {
    "pycolmap": "colmap",
    **dict.fromkeys(("scikit-image", "trimesh", "fast-simplification", "xatlas"), "mesh"),
    "viser": "viewer",
    "OpenEXR": "exr",
    "pillow-heif": "heic",
    "warp-lang": "nvdb",
    "nibabel": "nifti",
    "gaussforge": "splats",
    "usd-core": "usd",
    **dict.fromkeys(("hydra-joblib-launcher", "joblib"), "sweep"),
    "huggingface_hub": "hub",
    **{"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "rerun-sdk": "rerun"},
    "nerfbaselines": "nerfbaselines",
    "torchmetrics": "lpips",
}
"""Optional packages -> the extra of voxelfield that installs them."""


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no options."""


def run_doctor(options: argparse.Namespace) -> int:
    """Check this machine: versions, compilers, GPUs and their limits, compiled kernels and optional packages."""
    for check in (versions, packaged_kernels, compilers, gpus, cpu_kernels, cuda_kernels, optional_packages):
        try:
            for name, found in check():
                print(f"{name:22} {found}")  # noqa: T201
        except (RuntimeError, OSError) as error:
            print(f"FAILED {check.__name__.replace('_', ' ')}: {error}")  # noqa: T201
            return 1
    print("all checks passed")  # noqa: T201
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Names versions and environment variables."""
    yield "voxelfield", f"{__version__} in {_build.sources.package_directory()}"
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield "torch", f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads"
    for variable in sorted(os.environ):
        if variable.startswith(_VARIABLES):
            yield f"${variable}", os.environ[variable]


def packaged_kernels() -> Iterator[tuple[str, str]]:
    """Names the compiled halves in the package, with their targets."""
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
            f"{total / 2**30:.1f} GiB free, {shared} bytes of shared memory per block",
        )
        if (device.major, device.minor) < _build.architectures.OLDEST:
            major, minor = _build.architectures.OLDEST
            raise RuntimeError(
                f"GPU {index} must have compute capability {major}.{minor} or later, got {device.major}.{device.minor}"
            )


def cpu_kernels() -> Iterator[tuple[str, str]]:
    """Loads the CPU kernels, compiling them if need be, and samples a grid."""
    yield from _kernels(_build.sources.CPU_MODULE, "cpu")


def cuda_kernels() -> Iterator[tuple[str, str]]:
    """Loads the CUDA kernels, compiling them if need be, and samples a grid on each GPU."""
    if not torch.cuda.is_available():
        yield "CUDA kernels", "not needed without a GPU"
        return
    yield from _kernels(_build.sources.CUDA_MODULE, *(f"cuda:{index}" for index in range(torch.cuda.device_count())))


def _kernels(module: str, *devices: str) -> Iterator[tuple[str, str]]:
    for device in devices:
        grid = torch.arange(2.0, device=device).view(2, 1, 1, 1).expand(2, 2, 2, 1).contiguous()
        middle = ops.sample_trilinear(grid, torch.full((1, 3), 0.5, device=device)).item()
        yield f"kernels on {device}", str(_library.loaded_modules()[module])
        if middle != 0.5:
            raise RuntimeError(f"sampling between 0 and 1 on {device} must give 0.5, got {middle}: run the tests")
    yield f"{module} compiled from", str(_build.sources.read_stamp(_library.loaded_modules()[module]))


def optional_packages() -> Iterator[tuple[str, str]]:
    """Names the packages of all extras; the ops and the fields need none of them."""
    for name, extra in EXTRAS.items():
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, f'optional, not installed: pip install "voxelfield[{extra}]"'


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--out", type=Path, help="folder for the modules (default: that of builds on first use)")
    add("--only", choices=sorted(HALVES), help="compile one half (default: CPU, and CUDA if a GPU is visible)")
    add("--objects", type=Path, help="keep object files here, so that only changed files are recompiled")
    add("--werror", action="store_true", help="treat the compilers' warnings as errors")


def run_build(options: argparse.Namespace) -> None:
    """Compile the extension ahead of time instead of on first use.

    It compiles the CPU half, and the CUDA half if there is nvcc and a GPU, into the folder that builds on first use
    also write to.
    """
    _build.sources.source_root()  # raises FileNotFoundError if there are no sources
    names, note = ([HALVES[options.only]], "") if options.only else _build.compiling.choose_modules()
    if note:
        logger.warning("voxelfield: %s", note)
    for name in names:
        directory = options.out or _build.compiling.module_directory(name)
        logger.info("built %s", _build.compiling.build(name, directory, options.objects, options.werror))


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument("--resolution", type=int, help="vertices along each axis (default: 256 on a GPU, else 128)")
    parser.add_argument("--points", type=int, help="number of random positions (default: 2^20 on a GPU, else 2^18)")


def run_bench(options: argparse.Namespace) -> None:
    """Time trilinear sampling as README's row "4, random" does, against the faster memory layout of F.grid_sample."""
    device = choose_device(options.device)
    large = device.type == "cuda"
    resolution = (256 if large else 128) if options.resolution is None else options.resolution
    count = 1 << (20 if large else 18) if options.points is None else options.points
    for name, value in (("resolution", resolution), ("points", count)):
        if value < 2:
            raise ValueError(f"--{name} must be at least 2, got {value}")
    grid = torch.randn(resolution, resolution, resolution, _CHANNELS, device=device)
    points = torch.rand(count, 3, device=device)
    volume = grid.permute(3, 2, 1, 0)[None]
    layouts = [volume.contiguous(memory_format=each) for each in (torch.contiguous_format, torch.channels_last_3d)]
    sites = (2 * points - 1).view(1, 1, 1, -1, 3)
    grid_sample = functools.partial(F.grid_sample, align_corners=True)
    statements = {  # the forward pass without a graph, the backward pass for the grid alone
        "forward": "op(grid, points)",
        "backward": "torch.autograd.grad(out, source, grad, retain_graph=True)",
    }
    processor = torch.cuda.get_device_name(device) if large else f"{torch.get_num_threads()} threads of a CPU"
    print(f"{resolution}^3 x {_CHANNELS}, {count} random positions; medians on {processor}")  # noqa: T201
    print(f"{'':9} {'voxelfield':>12} {'grid_sample':>12} {'ratio':>7}")  # noqa: T201
    for name, statement in statements.items():
        ours = _median_ms(statement, ops.sample_trilinear, grid, points)
        theirs = min(_median_ms(statement, grid_sample, layout, sites) for layout in layouts)
        print(f"{name:9} {ours:9.3f} ms {theirs:9.3f} ms {theirs / ours:6.2f}x")  # noqa: T201


def _median_ms(statement: str, op: Callable[[Tensor, Tensor], Tensor], grid: Tensor, points: Tensor) -> float:
    """Returns the median duration of a statement about an op and its result ``out``, in milliseconds."""
    source = grid.clone(memory_format=torch.preserve_format).requires_grad_()
    out = op(source, points)
    names = {"op": op, "grid": grid, "points": points, "source": source, "out": out, "grad": torch.ones_like(out)}
    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=_SECONDS).median
