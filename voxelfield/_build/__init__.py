"""The builder behind ``setup.py``, builds on first use and ``python -m voxelfield build``.

The extension is two modules with LibTorch's stable ABI and Python's limited API, so that one binary serves every
torch from 2.10 and every Python from 3.10: ``_C`` (operator schemas and CPU kernels) and ``_C_cuda`` (CUDA kernels).
Compiling the second needs nvcc, but neither a GPU nor a CUDA build of torch.

``setup.py`` loads this package by path, because importing ``voxelfield`` would need the dependencies of ops; modules
of this package import each other relatively and nothing else of voxelfield.
"""

from . import architectures, compiling, sources

__all__ = ["architectures", "compiling", "sources"]
