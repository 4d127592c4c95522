"""The one builder behind ``setup.py``, builds on first use and ``python -m voxelfield build``.

The extension is two modules with LibTorch's stable ABI and Python's limited API, so that one binary serves every
torch from 2.10 and every Python from 3.10: ``_C`` (operator schemas and CPU kernels) and ``_C_cuda`` (CUDA kernels).
Compiling the second needs nvcc, but neither a GPU nor a CUDA build of torch.

``setup.py`` loads this package by path, because importing ``voxelfield`` would need the dependencies of ops; modules
in here import each other relatively and nothing else of voxelfield.
"""

from .architectures import OLDEST, Architectures, architectures_for, driver_complaint, visible_capabilities
from .compiling import (
    build,
    build_command,
    cache_directory,
    choose_modules,
    cuda_architectures,
    extensions,
    module_directory,
)
from .digests import digest_path, verify_digest, write_digest
from .sources import CPU_MODULE, CUDA_MODULE, has_sources, package_directory, source_digest, source_root
from .stamps import Stamp, find_stamp, read_stamp, requested_variant, stamp_source
from .toolkit import cuda_major, find_cuda_home, require_cuda_home

__all__ = [
    "CPU_MODULE",
    "CUDA_MODULE",
    "OLDEST",
    "Architectures",
    "Stamp",
    "architectures_for",
    "build",
    "build_command",
    "cache_directory",
    "choose_modules",
    "cuda_architectures",
    "cuda_major",
    "digest_path",
    "driver_complaint",
    "extensions",
    "find_cuda_home",
    "find_stamp",
    "has_sources",
    "module_directory",
    "package_directory",
    "read_stamp",
    "requested_variant",
    "require_cuda_home",
    "source_digest",
    "source_root",
    "stamp_source",
    "verify_digest",
    "visible_capabilities",
    "write_digest",
]
