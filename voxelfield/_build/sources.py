"""Where the extension's sources are, and the digest that tells one state of them from another."""

from __future__ import annotations

import hashlib
from pathlib import Path

CPU_MODULE = "_C"
CUDA_MODULE = "_C_cuda"

_PACKAGE = Path(__file__).resolve().parents[1]
_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def package_directory() -> Path:
    """Returns the folder of the ``voxelfield`` package, in which prebuilt modules lie."""
    return _PACKAGE


def _find_sources() -> Path | None:
    package = package_directory()
    for root in (package / "extension", package.parent / "extension"):
        if (root / "module" / "library.cpp").is_file():
            return root
    return None


def has_sources() -> bool:
    """Tells whether anything can be compiled here: a wheel of compiled kernels has no sources."""
    return _find_sources() is not None


def source_root() -> Path:
    """Returns the folder of the extension's C++ and CUDA sources, in a clone or in an installed copy.

    Raises:
        FileNotFoundError: There are none.
    """
    root = _find_sources()
    if root is None:
        raise FileNotFoundError(
            f"{package_directory()} was installed from a wheel of compiled kernels, which has no sources to compile: "
            "install voxelfield from its sources"
        )
    return root


def source_digest() -> str:
    """Returns a digest of the extension's sources; every module is stamped with the one it was compiled from."""
    root = source_root()
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in _SUFFIXES):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
