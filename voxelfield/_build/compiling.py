"""Compiling the two modules with torch's setuptools command, for ``setup.py`` and for a folder of one's own."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .architectures import Architectures, Capability, architectures_for, visible_capabilities
from .bundles import write_bundles, write_if_changed
from .digests import digest_path, write_digest
from .sources import CPU_MODULE, CUDA_MODULE, source_digest, source_root
from .stamps import requested_variant, stamp_source
from .toolkit import cuda_major, find_cuda_home, known_architectures, require_cuda_home

logger = logging.getLogger("voxelfield.build")

# LibTorch symbols newer than 2.10 stay out, so that the binary loads there and on everything later.
_TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Without -fno-math-errno no loop that takes a square root is vectorised. Hidden symbols: the modules call one another
# through torch's dispatcher alone, and g++ warns where visible types have fields of torch's hidden ones.
_UNIX_FLAGS = ("-O3", "-g0", "-fopenmp-simd", "-fno-math-errno", "-fvisibility=hidden", "-Wall")
# MSVC's traditional preprocessor has no _Pragma, which VOXELFIELD_VECTORIZE is made of.
_WINDOWS_FLAGS = ("/O2", "/openmp:experimental", "/Zc:preprocessor")
# C++ defines how the omitted last members of an aggregate are initialised.
_STRICT_FLAGS = ("-Wextra", "-Wno-missing-field-initializers", "-Werror")
# The sources are C++17. Only strict builds insist, because a later torch may have headers that need more.
_STRICT_STANDARD = "-std=c++17"
# Of the folders in which builds take place, before the process's number. Several machines may share a home.
_SCRATCH = f"build-{socket.gethostname()}-"
# CPU seconds of a compilation, measured: for estimates of how long one takes.
_CPU_HALF_SECONDS, _CUDA_FIXED_SECONDS, _CUDA_SECONDS_PER_ARCHITECTURE = 90, 77, 106


def choose_modules() -> tuple[list[str], str]:
    """Chooses the modules to compile if none is requested by name.

    The CPU half always; the CUDA half where there is nvcc and a GPU to run it. ``VOXELFIELD_CUDA=1`` demands it, for a
    machine without a GPU that builds for others, and ``VOXELFIELD_CUDA=0`` leaves it out.

    Returns:
        The modules' names, and a sentence that says why the CUDA half is not among them ("" if it is).

    Raises:
        FileNotFoundError: ``VOXELFIELD_CUDA=1``, but there is no nvcc.
        ValueError: ``VOXELFIELD_CUDA`` has another value.
    """
    requested = os.environ.get("VOXELFIELD_CUDA", "")
    if requested not in {"", "0", "1"}:
        raise ValueError(f"VOXELFIELD_CUDA must be 0, 1 or unset, got {requested!r}")
    both = [CPU_MODULE, CUDA_MODULE]
    if requested == "0":
        return [CPU_MODULE], "VOXELFIELD_CUDA=0: only the CPU half is compiled"
    if find_cuda_home() is None:
        if requested == "1":
            raise FileNotFoundError("VOXELFIELD_CUDA=1 needs nvcc, which is neither on the PATH nor in CUDA_HOME")
        return [CPU_MODULE], "no nvcc on the PATH or in CUDA_HOME: only the CPU half is compiled"
    if requested == "1" or visible_capabilities():
        return both, ""
    return [CPU_MODULE], (
        "no GPU is visible: only the CPU half is compiled now. The CUDA half is compiled on first use on a machine "
        "with a GPU, or now with VOXELFIELD_CUDA=1"
    )


def cuda_architectures(capabilities: Sequence[Capability] | None = None) -> Architectures:
    """Chooses the architectures to compile for: ``TORCH_CUDA_ARCH_LIST``, else the GPUs at hand, else the common ones.

    Args:
        capabilities: Compute capabilities of the GPUs; None: those that the driver shows.
    """
    gpus = visible_capabilities() if capabilities is None else capabilities
    return architectures_for(gpus, known_architectures(require_cuda_home()))


def extensions(names: Iterable[str], sources_relative_to: Path | None = None, strict: bool = False) -> list[Any]:
    """Describes modules as setuptools extensions.

    Args:
        names: ``_C`` and/or ``_C_cuda``.
        sources_relative_to: Folder that source paths are given relative to (setuptools wants that in setup.py).
        strict: Makes warnings errors, as CI does.

    Returns:
        A list of ``setuptools.Extension``.
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
    # which holds the stream symbol that the CUDA module looks up. After the libraries the flag would do nothing. The
    # linker of macOS, where there is no CUDA, does not know it.
    link = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"] if sys.platform == "linux" else []
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
    """Says what is about to be compiled, how long that takes roughly and how to make it shorter."""
    jobs = os.environ.get("MAX_JOBS", "")
    cores = min(int(jobs), os.cpu_count() or 1) if jobs.isdigit() and int(jobs) else os.cpu_count() or 1
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


def _tell(message: str, terminal: bool) -> None:
    """Logs a message; with ``terminal``, shows it on the terminal too if stderr is captured, as pip does without -v."""
    logger.warning(message)
    if terminal and not sys.stderr.isatty():
        with contextlib.suppress(OSError), Path("/dev/tty").open("w") as screen:
            screen.write(f"\n{message}\n")


def build_command(note: str = "", terminal: bool = False) -> Any:
    """Returns the setuptools ``build_ext`` class that compiles the extension (ninja, no torch_python).

    Args:
        note: A sentence to say before anything is compiled; "" for none.
        terminal: Messages also go to the terminal where stderr is captured.
    """
    import torch
    from torch.utils.cpp_extension import BuildExtension

    class BuildModules(BuildExtension):
        """Stamps each module and keeps its objects apart: ``gather.cpp`` and ``gather.cu`` lie in one folder."""

        build_temp: str

        def run(self) -> None:
            if note:
                _tell(f"voxelfield: {note}", terminal)
            super().run()

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
            ext.sources = [*ext.sources, str(_write_stamp(name, objects))]
            _tell(_announcement(name, len(ext.sources)), terminal)
            try:
                super().build_extension(ext)
            finally:
                self.build_temp = shared
            write_digest(Path(self.get_ext_fullpath(ext.name)))

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            package = self.get_finalized_command("build_py")
            for ext in self.extensions:
                parts = self.get_ext_fullname(ext.name).split(".")
                folder = Path(package.get_package_dir(".".join(parts[:-1])))
                write_digest(folder / Path(self.get_ext_filename(ext.name)).name)

    return BuildModules.with_options(use_ninja=True, no_python_abi_suffix=False)


def _write_stamp(name: str, folder: Path) -> Path:
    """Writes the translation unit that stamps a module."""
    if name == CPU_MODULE:
        return write_if_changed(folder / "stamp.cpp", stamp_source(Architectures(), ""))
    return write_if_changed(folder / "stamp.cu", stamp_source(cuda_architectures(), requested_variant()))


def build(names: Iterable[str], directory: Path, objects: Path | None = None, strict: bool = False) -> list[Path]:
    """Compiles modules into a directory.

    Args:
        names: ``_C`` and/or ``_C_cuda``.
        directory: Where the modules go; made if absent. A module already there is replaced in one step. What
            killed builds of this machine left there is removed.
        objects: Where object files stay, so that the next build compiles only what changed; a temporary folder if None.
        strict: Makes warnings errors, as CI does.

    Returns:
        The paths of the modules.
    """
    from setuptools import Distribution

    directory.mkdir(parents=True, exist_ok=True)
    built = []
    _remove_abandoned(directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix=f"{_SCRATCH}{os.getpid()}-") as scratch:
        distribution = Distribution({"name": "voxelfield", "ext_modules": extensions(names, strict=strict)})
        command = build_command()(distribution)
        command.build_lib = scratch
        command.build_temp = str((objects or Path(scratch, "objects")).resolve())
        command.ensure_finalized()
        command.run()
        made = sorted(Path(scratch, "voxelfield").iterdir())
        modules = [path for path in made if digest_path(path) in made]
        for module in modules:
            digest_path(module).replace(digest_path(directory / module.name))
            module.replace(directory / module.name)
            built.append(directory / module.name)
    return built


def _remove_abandoned(directory: Path) -> None:
    """Removes the folders of builds on this machine whose process no longer exists; does nothing on Windows."""
    if os.name == "nt":  # there, os.kill cannot ask whether a process exists: signal 0 is Ctrl-C
        return
    for folder in directory.glob(f"{glob.escape(_SCRATCH)}*"):
        process = folder.name.removeprefix(_SCRATCH).partition("-")[0]
        if not process.isdigit() or int(process) == os.getpid():
            continue
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # the process belongs to another user
            continue


def cache_directory() -> Path:
    """Returns where builds on first use of exactly these sources live (below ``$TORCH_EXTENSIONS_DIR`` if set)."""
    from torch.utils.cpp_extension import get_default_build_root

    base = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return Path(base) / f"voxelfield_{source_digest()}"


def module_directory(name: str, capabilities: Sequence[Capability] | None = None) -> Path:
    """Returns the folder in the cache for a module as this environment has it compiled.

    A home shared by several machines has one for each set of GPUs and each major version of CUDA.
    """
    if name == CPU_MODULE:
        return cache_directory() / "cpu"
    variant = [requested_variant().replace(",", "_").replace("=", "-")] if requested_variant() else []
    cuda = f"cuda{cuda_major(require_cuda_home())}"
    return cache_directory() / "_".join([cuda, cuda_architectures(capabilities).folder(), *variant])
