"""Compiling the extension: the one builder behind ``setup.py``, just-in-time builds and ``python -m voxelfield.build``.

The extension is two modules with LibTorch's stable ABI and Python's limited API, so that one binary serves every
torch from 2.10 and every Python from 3.10: ``_C`` (operator schemas and CPU kernels) and ``_C_cuda`` (CUDA kernels).
The second needs nvcc but neither a GPU nor a CUDA build of torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

logger = logging.getLogger("voxelfield.build")

CPU_MODULE = "_C"
CUDA_MODULE = "_C_cuda"
PACKAGE = Path(__file__).resolve().parent

# LibTorch symbols newer than 2.10 stay out, so that the binary loads there and on everything later.
_TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Machine code for the architectures in use; the newest that nvcc knows also as PTX, for those to come.
_ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


def source_root() -> Path:
    """Returns the folder of the extension's C++ and CUDA sources, in a clone or in an installed copy."""
    for root in (PACKAGE / "extension", PACKAGE.parent / "extension"):
        if (root / "module" / "library.cpp").is_file():
            return root
    raise FileNotFoundError(
        f"the extension's sources are neither in {PACKAGE / 'extension'} nor in {PACKAGE.parent / 'extension'}; "
        "reinstall voxelfield"
    )


def source_digest() -> str:
    """Returns a digest of the extension's sources; every module is stamped with the one it was compiled from."""
    root = source_root()
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_stamp(module: Path) -> tuple[str, int] | None:
    """Returns (source digest, CUDA major or 0) of a compiled module without loading it, None if it bears no stamp."""
    found = re.search(rb"voxelfield-source-digest:([0-9a-f]+);cuda:(\d+);", module.read_bytes())
    return (found[1].decode(), int(found[2])) if found else None


def find_cuda_home() -> Path | None:
    """Returns the root of the CUDA toolkit (``$CUDA_HOME``, ``$CUDA_PATH``, or where nvcc says it lives), else None.

    A variable that names a folder without nvcc, left behind by a toolkit that has gone, is passed over with a warning.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            if shutil.which("nvcc", path=str(Path(value) / "bin")) is not None:
                return Path(value)
            logger.warning("ignoring %s=%s: there is no bin/nvcc in it", variable, value)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    # nvcc on the PATH may be a link or a wrapper script; only nvcc itself knows its toolkit.
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else Path(nvcc).resolve().parent.parent


def module_names() -> list[str]:
    """Returns the modules that this machine can compile; ``VOXELFIELD_CUDA=0`` or ``1`` forbids or demands CUDA."""
    wish = os.environ.get("VOXELFIELD_CUDA", "")
    if wish not in {"", "0", "1"}:
        raise ValueError(f"VOXELFIELD_CUDA must be 0, 1 or unset, got {wish!r}")
    if wish == "0":
        return [CPU_MODULE]
    if find_cuda_home() is not None:
        return [CPU_MODULE, CUDA_MODULE]
    if wish == "1":
        raise FileNotFoundError("VOXELFIELD_CUDA=1 but no nvcc: it is not on the PATH, nor in CUDA_HOME")
    logger.warning("no nvcc on the PATH or in CUDA_HOME: building the CPU half only")
    return [CPU_MODULE]


def extensions(names: Iterable[str], sources_relative_to: Path | None = None) -> list[Any]:
    """Describes modules as setuptools extensions.

    Args:
        names: ``_C`` and/or ``_C_cuda``.
        sources_relative_to: Folder that source paths are given relative to (setuptools wants that in setup.py).

    Returns:
        A list of ``setuptools.Extension``.
    """
    from torch.utils import cpp_extension

    root = source_root()
    if sources_relative_to is not None:
        root = root.relative_to(sources_relative_to)
    define = [_TORCH_TARGET, f"-DVOXELFIELD_SOURCE_DIGEST={source_digest()}"]
    windows = os.name == "nt"
    # Without -fno-math-errno no loop that takes a square root is vectorised.
    unix = ["-O3", "-g0", "-fopenmp-simd", "-fno-math-errno", "-Wall"]
    cxx = [*define, "/O2", "/openmp:experimental"] if windows else [*define, *unix]
    # --no-as-needed keeps libtorch.so among the needed libraries: on a CUDA build of torch it brings libtorch_cuda,
    # which holds the stream symbol that the CUDA module looks up. After the libraries the flag would do nothing.
    link = [] if windows else ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    described = []
    for name in names:
        common: dict[str, Any] = {
            "py_limited_api": True,
            "extra_link_args": list(link),
            "include_dirs": [str(root.resolve())],
        }
        if name == CPU_MODULE:
            sources = sorted(root.rglob("*.cpp"))
            common["extra_compile_args"] = {"cxx": cxx}
        else:
            home = _enable_nvcc(cpp_extension)
            sources = sorted(root.rglob("*.cu"))
            common["extra_compile_args"] = {"cxx": cxx, "nvcc": [*define, "-O3", "-DUSE_CUDA"]}
            common["include_dirs"].append(str(home / "include"))
            common["library_dirs"] = [
                str(p) for p in (home / "lib64", home / "lib", home / "lib" / "x64") if p.is_dir()
            ]
            common["libraries"] = ["cudart"]
        described.append(cpp_extension.CppExtension(f"voxelfield.{name}", [str(s) for s in sources], **common))
    return described


def _enable_nvcc(cpp_extension: Any) -> Path:
    """Lets torch's build tools use nvcc beside a CPU-only torch too, for every architecture unless told which."""
    import torch

    home = find_cuda_home()
    if home is None:
        raise FileNotFoundError("compiling the CUDA half needs nvcc: put it on the PATH or set CUDA_HOME")
    cpp_extension.CUDA_HOME = str(home)
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", _architectures(home))
    return home


def _architectures(home: Path) -> str:
    """Returns those of the architectures in use that a toolkit's nvcc can compile for, as TORCH_CUDA_ARCH_LIST."""
    nvcc = home / "bin" / "nvcc"
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    usable = [arch for arch in _ARCHITECTURES if f"compute_{arch.replace('.', '')}" in known]
    return ";".join(usable) + "+PTX"


def build_command() -> Any:
    """Returns the setuptools ``build_ext`` class that compiles the extension (ninja, no torch_python)."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildModules(BuildExtension):
        """Keeps each module's objects apart: ``gather.cpp`` and ``gather.cu`` lie in one folder."""

        def build_extension(self, ext: Any) -> None:
            shared = self.build_temp
            self.build_temp = str(Path(shared) / ext.name.rpartition(".")[2])
            try:
                super().build_extension(ext)
            finally:
                self.build_temp = shared

    return BuildModules.with_options(use_ninja=True, no_python_abi_suffix=False)


def build(names: Iterable[str], directory: Path) -> list[Path]:
    """Compiles modules into a directory.

    Args:
        names: ``_C`` and/or ``_C_cuda``.
        directory: Where the modules go; made if absent. A module already there is replaced in one step.

    Returns:
        The paths of the modules.
    """
    from setuptools import Distribution

    directory.mkdir(parents=True, exist_ok=True)
    built = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="build-") as scratch:
        distribution = Distribution({"name": "voxelfield", "ext_modules": extensions(names)})
        command = build_command()(distribution)
        command.build_lib = scratch
        command.build_temp = str(Path(scratch) / "objects")
        command.ensure_finalized()
        command.run()
        for module in sorted(Path(scratch, "voxelfield").iterdir()):
            module.replace(directory / module.name)
            built.append(directory / module.name)
    return built


def cache_directory() -> Path:
    """Returns where just-in-time builds of exactly these sources live (below ``$TORCH_EXTENSIONS_DIR`` if set)."""
    from torch.utils.cpp_extension import get_default_build_root

    base = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return Path(base) / f"voxelfield_{source_digest()}"
