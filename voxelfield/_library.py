"""Finding, building and loading the compiled modules.

Importing voxelfield does none of it; the first use of an op does.
"""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout

from voxelfield import _build

logger = logging.getLogger("voxelfield")

_lock = threading.RLock()
_loaded: dict[str, Path] = {}
_failed: dict[str, str] = {}
_registrations: list[Callable[[], None]] = []


def when_loaded(register: Callable[[], None]) -> Callable[[], None]:
    """Decorates a function that registers fakes and derivatives; it runs once the operators' schemas exist."""
    _registrations.append(register)
    return register


@torch.compiler.assume_constant_result
def ensure_loaded(device_type: str) -> bool:
    """Loads the kernels for a device type, compiling them first if no fitting binary exists.

    Args:
        device_type: ``torch.device.type`` of the tensors at hand.

    Returns:
        True, so that torch.compile can take the call as a constant.

    Raises:
        NotImplementedError: There are no kernels for this device type.
        RuntimeError: The kernels could not be compiled or do not fit this torch; the message says why.
    """
    if device_type == "meta":
        device_type = "cpu"  # shapes come from the fake kernels, which need the schemas only
    if device_type not in {"cpu", "cuda"}:
        raise NotImplementedError(f"voxelfield has kernels for cpu and cuda tensors, got a tensor on {device_type!r}")
    with _lock:
        _ensure_module(_build.CPU_MODULE)
        if device_type == "cuda":
            _ensure_module(_build.CUDA_MODULE)
    return True


def loaded_modules() -> dict[str, Path]:
    """Returns the file of each module loaded so far."""
    return dict(_loaded)


def _ensure_module(name: str) -> None:
    if name in _loaded:
        return
    if name in _failed:
        raise RuntimeError(_failed[name])
    try:
        path = _find(name) or _build_just_in_time(name)
        _check_cuda(name, path)
        torch.ops.load_library(path)
    except (RuntimeError, OSError) as error:
        # Ops are called thousands of times: fail the same way at once instead of compiling again.
        _failed[name] = str(error)
        raise
    _loaded[name] = path
    if name == _build.CPU_MODULE:
        for register in _registrations:
            register()


def _folders() -> Iterator[Path]:
    yield _build.PACKAGE
    # A clone's own voxelfield/ may shadow an installed package that has binaries: those serve if the sources agree.
    for distribution in importlib.metadata.distributions(name="voxelfield"):
        yield Path(str(distribution.locate_file("voxelfield")))
    # Last: to ask torch where that is takes longer than all the rest.
    yield _build.cache_directory()


def _candidates(name: str) -> Iterator[Path]:
    """Prebuilt modules in the order they are tried: beside this file, in an installed copy, in the build cache."""
    seen = set()
    for folder in _folders():
        for suffix in (".abi3.so", ".pyd", ".so"):
            path = folder / f"{name}{suffix}"
            if path not in seen and path.is_file():
                seen.add(path)
                yield path


def _find(name: str) -> Path | None:
    digest = _build.source_digest()
    for path in _candidates(name):
        stamp = _build.read_stamp(path)
        if stamp is not None and stamp[0] == digest:
            return path
    return None


def _warn_of_unfit(name: str) -> None:
    for path in _candidates(name):
        logger.warning("ignoring %s: it was built from other sources than %s", path, _build.source_root())


def _acquire(lock: FileLock, half: str) -> AcquireReturnProxy:
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        logger.warning("voxelfield: another process is compiling the %s kernels; waiting for it", half)
        return lock.acquire()


def _build_just_in_time(name: str) -> Path:
    directory = _build.cache_directory()
    half = "CUDA" if name == _build.CUDA_MODULE else "CPU"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeError(
            f"no prebuilt {half} kernels fit, and the folder to compile them into cannot be made ({error}); set "
            "TORCH_EXTENSIONS_DIR to a folder that can be written"
        ) from error
    # The operating system drops this lock when its holder dies, so that no stale lock can stop a later build.
    with _acquire(FileLock(directory / f"{name}.lock"), half):
        if (ready := _find(name)) is not None:
            return ready
        _warn_of_unfit(name)
        logger.warning(
            "voxelfield: no prebuilt %s kernels fit; compiling them once into %s (a minute or two)",
            half,
            directory,
        )
        started = time.monotonic()
        # The builder sees the packages that this process sees, whatever lies in the working directory.
        search = [str(_build.PACKAGE.parent), *sys.path]
        start = f"import sys; sys.path[:] = {search!r}; from voxelfield.build import main; main()"
        command = [sys.executable, "-c", start, "--only", half.lower(), "--out", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        ready = _find(name) if done.returncode == 0 else None
        if ready is None:
            # ninja passes the compilers' words on to stdout; stderr ends a traceback with what went wrong in Python.
            output = done.stdout.strip().splitlines()[-30:] + done.stderr.strip().splitlines()[-1:]
            raise RuntimeError(
                f"voxelfield could not compile its {half} kernels (exit status {done.returncode}). The end of the "
                "compiler's output:\n  "
                + "\n  ".join(output)
                + f"\nNeeded: {'nvcc (PATH or CUDA_HOME) and ' if half == 'CUDA' else ''}a C++17 compiler (CXX) and "
                f"ninja. Once that is mended, `{Path(sys.executable).name} -m voxelfield.build` shows the whole build."
            )
        logger.warning("voxelfield: compiled the %s kernels in %.0f s", half, time.monotonic() - started)
        return ready


def _check_cuda(name: str, path: Path) -> None:
    if name != _build.CUDA_MODULE:
        return
    stamp = _build.read_stamp(path)
    ours = stamp[1] if stamp else 0
    theirs = int((torch.version.cuda or "0").split(".")[0])
    if ours != theirs:
        raise RuntimeError(
            f"{path} was compiled by CUDA {ours}, but this torch ({torch.__version__}) runs CUDA "
            f"{theirs or 'not at all'}; compile it again with that CUDA's nvcc: "
            f"`python -m voxelfield.build --only cuda --out {path.parent}`"
        )
