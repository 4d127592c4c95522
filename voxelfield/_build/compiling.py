"""Compiling the two modules with torch's setuptools command, for ``setup.py`` or into any folder."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .architectures import (
    Architectures,
    architectures_for,
    cuda_major,
    find_cuda_home,
    known_architectures,
    require_cuda_home,
    visible_capabilities,
)
from .sources import CPU_MODULE, CUDA_MODULE, requested_variant, source_digest, source_root, stamp_source, write_digest

logger = logging.getLogger("voxelfield.build")

# LibTorch symbols newer than 2.10 stay out, so that the binary loads there and on everything later.
_TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Without -fno-math-errno no loop that takes a square root is vectorised, and without -fno-trapping-math few that
# compare floats: g++ would preserve the exceptions of branches not taken. Hidden symbols: the modules call one another
# through torch's dispatcher alone, and g++ warns where visible types have fields of torch's hidden ones.
_UNIX_FLAGS = ("-O3", "-g0", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall")
# MSVC's traditional preprocessor has no _Pragma, which VOXELFIELD_VECTORIZE uses.
_WINDOWS_FLAGS = ("/O2", "/openmp:experimental", "/Zc:preprocessor")
# C++ defines how the omitted last members of an aggregate are initialised.
_STRICT_FLAGS = ("-Wextra", "-Wno-missing-field-initializers", "-Werror")
# The sources are C++17. Only strict builds insist, because a later torch may have headers that need more.
_STRICT_STANDARD = "-std=c++17"
# CPU seconds of a compilation, measured, of which stencil/separable.* takes 47, 7 and 14: for estimates of how long one
# takes.
_CPU_HALF_SECONDS, _CUDA_FIXED_SECONDS, _CUDA_SECONDS_PER_ARCHITECTURE = 137, 84, 120

# Sources that take long by themselves, the longest first: one that began last would leave the other cores idle.
LONG = (
    "mlp/backward.cu",
    "stencil/gather.cu",
    "stencil/splat_tiled.cu",
    "fields/sh_render.cu",
    "stencil/separable.cu",
    "stencil/splat.cu",
    "fields/pyramid_render.cu",
)


def choose_modules() -> tuple[list[str], str]:
    """Chooses the modules to compile if none is requested by name, and says why the CUDA half is not one ("" if it is).

    The CPU half always; the CUDA half where there is nvcc and a GPU to run it. ``VOXELFIELD_CUDA=1`` demands it, for a
    machine without a GPU that builds for others, and ``VOXELFIELD_CUDA=0`` leaves it out.
    """
    requested = os.environ.get("VOXELFIELD_CUDA", "")
    if requested not in {"", "0", "1"}:
        raise ValueError(f"VOXELFIELD_CUDA must be 0, 1 or unset, got {requested!r}")
    if requested == "0":
        return [CPU_MODULE], "VOXELFIELD_CUDA=0: only the CPU half is compiled"
    if requested == "1":
        try:
            require_cuda_home()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"VOXELFIELD_CUDA=1: {error}") from None
    elif find_cuda_home() is None:
        return [CPU_MODULE], "no nvcc on the PATH or in CUDA_HOME: only the CPU half is compiled"
    if requested == "1" or visible_capabilities():
        return [CPU_MODULE, CUDA_MODULE], ""
    return [CPU_MODULE], (
        "no GPU is visible: only the CPU half is compiled now. The CUDA half is compiled on first use on a machine "
        "with a GPU, or now with VOXELFIELD_CUDA=1"
    )


def cuda_architectures() -> Architectures:
    """Chooses the architectures to compile for, those of the GPUs that torch sees if there are any."""
    return architectures_for(visible_capabilities(), known_architectures(require_cuda_home()))


def extensions(names: Iterable[str], sources_relative_to: Path | None = None, strict: bool = False) -> list[Any]:
    """Describes modules, ``_C`` and/or ``_C_cuda``, as a list of ``setuptools.Extension``.

    In setup.py, setuptools wants paths of sources relative to its folder. ``strict`` makes warnings errors, as CI does.
    """
    from torch.utils import cpp_extension

    root = source_root()
    if sources_relative_to is not None:
        root = root.relative_to(sources_relative_to)
    windows = os.name == "nt"
    host = [*_UNIX_FLAGS, *((*_STRICT_FLAGS, _STRICT_STANDARD) if strict else ())]
    # torch gives its own headers as -I; the same folder as -isystem takes precedence and silences their warnings.
    headers = [] if windows else cpp_extension.include_paths()
    system = [f"-isystem{folder}" for folder in headers]
    cxx = [_TORCH_TARGET, *_WINDOWS_FLAGS] if windows else [_TORCH_TARGET, *system, *host]
    # --no-as-needed keeps libtorch.so among the needed libraries: on a CUDA build of torch it brings libtorch_cuda,
    # which contains the stream symbol that the CUDA module looks up. After the libraries the flag would do nothing.
    # --exclude-libs hides symbols of static libraries: some compilers link libstdc++ statically, and its locales must
    # not mix with the locales of torch's copy. The linker of macOS, where there is no CUDA, knows neither flag.
    flags = ["-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    link = flags if sys.platform == "linux" else []
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
            home = require_cuda_home()
            cpp_extension.CUDA_HOME = str(home)  # torch finds none beside a CPU-only build of itself
            sources = sorted(root.rglob("*.cu"))
            # -O is for host code alone, which only launches; device code is optimised fully in any case.
            nvcc = [_TORCH_TARGET, "-O1", "-DUSE_CUDA", *cuda_architectures().nvcc_flags()]
            if not windows:
                nvcc += [f"-isystem={folder}" for folder in headers]
                warnings = ["-Wall", *(_STRICT_FLAGS if strict else ())]
                nvcc += ["-Xcompiler", ",".join(["-fvisibility=hidden", *warnings])]
                nvcc += ["-Werror", "all-warnings", _STRICT_STANDARD] if strict else []
            common["extra_compile_args"] = {"cxx": cxx, "nvcc": nvcc}
            common["include_dirs"].append(str(home / "include"))
            common["library_dirs"] = [
                str(p) for p in (home / "lib64", home / "lib", home / "lib" / "x64") if p.is_dir()
            ]
            # The runtime is linked statically, so that the module works beside a torch of another CUDA version; on
            # Linux, it needs the other libraries.
            common["libraries"] = ["cudart_static", *([] if windows else ["dl", "pthread", "rt"])]
        described.append(cpp_extension.CppExtension(f"voxelfield.{name}", [str(s) for s in sources], **common))
    return described


def _announcement(name: str, sources: int) -> str:
    """Returns a line on the module, the approximate duration and the way to shorten it."""
    cores = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    if name == CPU_MODULE:
        half, seconds, remedy = "CPU half", _CPU_HALF_SECONDS, ""
    else:
        architectures = cuda_architectures()
        half = f"CUDA half for {architectures}"
        count = len({*architectures.sm, *architectures.ptx})
        seconds = _CUDA_FIXED_SECONDS + _CUDA_SECONDS_PER_ARCHITECTURE * count
        remedy = "; TORCH_CUDA_ARCH_LIST=8.6 (your GPU's compute capability) compiles for one only" if count > 1 else ""
    minutes = max(1, round(seconds / cores / 60))
    return f"voxelfield: compiling the {half}: {sources} files, about {minutes} min on {cores} cores{remedy}"


def bundles(root: Path) -> dict[str, list[str]]:
    """Groups the CUDA sources below the extension's folder into translation units, in the order to compile them.

    Every translation unit costs about two seconds of processor time for each GPU architecture, and four for host code,
    to read the headers of torch and CUDA. A small source takes little more than that, so the small sources of a folder
    are compiled together.
    """
    sources = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.cu"))
    units = {source.removesuffix(".cu").replace("/", "_"): [source] for source in LONG if source in sources}
    for source in sources:
        if source not in LONG:
            units.setdefault(source.partition("/")[0], []).append(source)
    return units


def write_bundles(root: Path, folder: Path) -> list[Path]:
    """Writes the translation units of :func:`bundles` to a folder. They sort in order, as setuptools sorts sources."""
    return [
        _write_if_changed(folder / f"{index:02}_{name}.cu", "".join(f'#include "{source}"\n' for source in sources))
        for index, (name, sources) in enumerate(bundles(root).items())
    ]


def _write_if_changed(path: Path, content: str) -> Path:
    """Writes a generated source unless it exists already, because ninja compares modification times."""
    if not path.is_file() or path.read_text() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return path


def build_command() -> Any:
    """Returns the setuptools ``build_ext`` class that compiles the extension (ninja, no torch_python)."""
    import torch
    from torch.utils.cpp_extension import BuildExtension

    class BuildModules(BuildExtension):
        """Stamps each module and separates its objects: ``gather.cpp`` and ``gather.cu`` are in one folder."""

        build_temp: str

        def build_extension(self, ext: Any) -> None:
            shared = self.build_temp
            name = ext.name.rpartition(".")[2]
            # ninja does not follow headers given as -isystem, so that another torch needs other objects.
            objects = Path(shared) / f"{name}-torch{torch.__version__}"
            if name == CUDA_MODULE and torch.version.cuda is None:
                # Beside a CPU-only torch, BuildExtension records no headers for nvcc's objects, so that ninja could
                # take stale ones.
                shutil.rmtree(objects, ignore_errors=True)
            self.build_temp = str(objects)
            if name == CUDA_MODULE:
                # Not before: setuptools puts the sources that an extension lists into a source archive.
                ext.sources = [str(path) for path in write_bundles(source_root(), objects / "bundles")]
            gpus = (cuda_architectures(), requested_variant()) if name == CUDA_MODULE else (Architectures(), "")
            stamp = objects / ("stamp.cu" if name == CUDA_MODULE else "stamp.cpp")
            ext.sources = [*ext.sources, str(_write_if_changed(stamp, stamp_source(*gpus)))]
            logger.warning(_announcement(name, len(ext.sources)))
            try:
                super().build_extension(ext)
            finally:
                self.build_temp = shared
            write_digest(Path(self.get_ext_fullpath(ext.name)))

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            for ext in self.extensions:
                write_digest(Path(self.get_ext_fullpath(ext.name)))

    return BuildModules.with_options(use_ninja=True, no_python_abi_suffix=False)


def build(name: str, directory: Path, objects: Path | None = None, strict: bool = False) -> Path:
    """Compiles a module into a directory, where it replaces an earlier one in one step, and returns its path.

    Object files stay in the folder ``objects``, so that the next build compiles only what changed; none stay if None.
    """
    from setuptools import Distribution

    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="voxelfield-") as scratch:
        distribution = Distribution({"name": "voxelfield", "ext_modules": extensions([name], strict=strict)})
        command = build_command()(distribution)
        command.build_lib = scratch
        command.build_temp = str((objects or Path(scratch, "objects")).resolve())
        command.ensure_finalized()
        command.run()
        (digest,) = Path(scratch, "voxelfield").glob("*.digest")
        for made in (digest, digest.with_suffix("")):
            # The folder may be in another file system, where a move is not atomic.
            temporary = directory / f".{made.name}.{os.getpid()}"
            shutil.copy(made, temporary)
            temporary.replace(directory / made.name)
    return directory / digest.stem


def cache_directory() -> Path:
    """Returns the folder for builds of these sources on first use, below ``$TORCH_EXTENSIONS_DIR`` if set."""
    from torch.utils.cpp_extension import get_default_build_root

    base = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return Path(base) / f"voxelfield_{source_digest()}"


def module_directory(name: str) -> Path:
    """Returns the folder in the cache for a module with this environment's options.

    A home shared by several machines has one for each set of GPUs and each major version of CUDA.
    """
    if name == CPU_MODULE:
        return cache_directory() / "cpu"
    cuda, chosen = cuda_major(require_cuda_home()), cuda_architectures()
    return cache_directory() / re.sub(r"[;,]", "_", f"cuda{cuda}_{chosen.torch_list()}_{requested_variant()}")
