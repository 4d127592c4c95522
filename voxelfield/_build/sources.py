"""The extension's sources, and the stamp and the digest by which a compiled module is recognised."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from .architectures import Architectures, driver_for

CPU_MODULE = "_C"
CUDA_MODULE = "_C_cuda"

_PACKAGE = Path(__file__).resolve().parents[1]
_PATTERN = re.compile(
    rb"voxelfield-source-digest:(?P<digest>[0-9a-f]+);sm:(?P<sm>[0-9a-z,]*);ptx:(?P<ptx>[0-9a-z,]*);"
    rb"variant:(?P<variant>[^;]*);cuda:(?P<cuda>[0-9]+);"
)
_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def package_directory() -> Path:
    """Returns the folder of the ``voxelfield`` package, which contains prebuilt modules, if any."""
    return _PACKAGE


def _find_sources() -> Path | None:
    package = package_directory()
    for root in (package / "extension", package.parent / "extension"):
        if (root / "module" / "library.cpp").is_file():
            return root
    return None


def has_sources() -> bool:
    """Returns whether anything can be compiled: a wheel of compiled kernels has no sources."""
    return _find_sources() is not None


def source_root() -> Path:
    """Returns the folder of the extension's sources, in a clone or an installed copy, or raises FileNotFoundError."""
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


class Stamp(NamedTuple):
    """How a module was compiled."""

    digest: str
    architectures: Architectures
    variant: str  # the VOXELFIELD_* macros that NVCC_APPEND_FLAGS and NVCC_PREPEND_FLAGS defined
    cuda: int  # major version of the compiling nvcc; 0 in the CPU module

    def __str__(self) -> str:
        """Returns text for messages: ``"sources 0123ab; CUDA 13 (driver …); compute capability 9.0; no macros"``."""
        if not self.cuda:
            return f"sources {self.digest}; no CUDA"
        macros = f"macros {self.variant}" if self.variant else "no macros"
        return (
            f"sources {self.digest}; CUDA {self.cuda} (driver {driver_for(self.cuda)}); {self.architectures}; {macros}"
        )


def read_stamp(module: Path) -> Stamp | None:
    """Returns the stamp of a compiled module without loading it, None if the file has none."""
    return find_stamp(module.read_bytes())


def find_stamp(content: bytes) -> Stamp | None:
    """Returns the stamp in the content of a compiled module, None if there is none."""
    found = _PATTERN.search(content)
    if found is None:
        return None
    text = {name: value.decode() for name, value in found.groupdict().items()}
    architectures = Architectures(*(tuple(filter(None, text[kind].split(","))) for kind in ("sm", "ptx")))
    return Stamp(text["digest"], architectures, text["variant"], int(text["cuda"]))


def stamp_source(architectures: Architectures, variant: str) -> str:
    """Returns the translation unit that stamps a module of the present sources.

    It alone contains the digest: on every compiler's command line, each change would recompile every file.
    """
    sm, ptx = ",".join(architectures.sm), ",".join(architectures.ptx)
    stamp = f"voxelfield-source-digest:{source_digest()};sm:{sm};ptx:{ptx};variant:{variant};"
    return f'#define VOXELFIELD_STAMP "{stamp}"\n#include "module/stamp.h"\n'


def requested_variant() -> str:
    """Returns the VOXELFIELD macros that the environment makes nvcc define, such as ``VOXELFIELD_SCALAR_ATOMICS``.

    Other flags in ``NVCC_APPEND_FLAGS``, such as ``-lineinfo``, do not change what a kernel computes and are left out.
    """
    flags = [
        flag for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS") for flag in shlex.split(os.environ.get(name, ""))
    ]
    return ",".join(sorted({flag[2:] for flag in flags if re.fullmatch(r"-DVOXELFIELD_\w+(=\w+)?", flag)}))


def digest_path(module: Path) -> Path:
    """Returns the path of the file with a module's digest.

    Loading a truncated module kills the process, and one with a flipped bit gives wrong results, so that each module
    is compared with a digest in a file next to it before it is loaded.
    """
    return module.with_name(f"{module.name}.digest")


def write_digest(module: Path) -> None:
    """Writes the digest of a module into a file next to it."""
    path = digest_path(module)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(_module_digest(module.read_bytes()) + "\n", encoding="ascii")
    temporary.replace(path)


def verify_digest(module: Path, content: bytes) -> str:
    """Returns why a module with this content must not be loaded, according to its digest; "" if the digest agrees."""
    path = digest_path(module)
    try:
        written = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return f"has no digest beside it ({path.name}) to be checked against"
    return "" if written == _module_digest(content) else f"is damaged, or was changed: {path.name} does not match"


def _module_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
