"""Finding, compiling and loading the extension's modules.

Importing voxelfield does none of it; the first use of an op does.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout

from voxelfield import _build

logger = logging.getLogger("voxelfield")

_OLDEST_TORCH = (2, 10)
_INSTALL_SOURCES = "install voxelfield from its sources, which are compiled on first use"

_lock = threading.RLock()
_loaded: dict[str, Path] = {}
_failed: dict[str, str] = {}
_registrations: list[Callable[[], None]] = []


class KernelsUnavailableError(RuntimeError):
    """No kernels can be loaded on this machine; the message says why."""


def when_loaded(register: Callable[[], None]) -> Callable[[], None]:
    """Decorates a function that registers fakes and derivatives, which need the operators' schemas to exist.

    It runs as soon as they do: at once if the CPU module is loaded already.
    """
    with _lock:
        if _build.CPU_MODULE in _loaded:
            register()
        else:
            _registrations.append(register)
    return register


def ensure_loaded(device_type: str) -> bool:
    """Loads the kernels for a device type, compiling them first if no fitting binary exists.

    Args:
        device_type: ``torch.device.type`` of the tensors at hand.

    Returns:
        True, so that torch.compile can take the call as a constant.

    Raises:
        NotImplementedError: There are no kernels for this device type.
        KernelsUnavailableError: The kernels could not be compiled, or none fit this torch and these GPUs; the message
            says why.
    """
    if device_type == "meta":
        device_type = "cpu"  # shapes come from the fake kernels, which need the schemas only
    if device_type not in {"cpu", "cuda"}:
        raise NotImplementedError(f"voxelfield has kernels for cpu and cuda tensors, got a tensor on {device_type!r}")
    with _lock:
        _ensure_module(_build.CPU_MODULE)
        # Without a visible GPU, "cuda" tensors are fake ones, and the schemas suffice.
        if device_type == "cuda" and _build.CUDA_MODULE not in _loaded and _capabilities():
            _ensure_module(_build.CUDA_MODULE)
    return True


# The effect of torch.compiler.assume_constant_result, without importing the compiler, which takes a second.
ensure_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def loaded_modules() -> dict[str, Path]:
    """Returns the file of each module loaded so far."""
    return dict(_loaded)


def _ensure_module(name: str) -> None:
    if name in _loaded:
        return
    if name in _failed:
        raise KernelsUnavailableError(_failed[name])
    try:
        _check_torch()
        path = _find(name) or _compile(name)
        torch.ops.load_library(path)
    except (RuntimeError, OSError, ValueError) as error:
        # Ops are called thousands of times: later calls raise the same error at once instead of compiling again.
        _failed[name] = str(error)
        raise
    _loaded[name] = path
    if name == _build.CPU_MODULE:
        while _registrations:
            _registrations.pop(0)()


def _check_torch() -> None:
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise KernelsUnavailableError(
            f"voxelfield needs torch {oldest} or later, got {torch.__version__}: pip install 'torch>={oldest}'"
        )


def _folders() -> Iterator[Path]:
    yield _build.package_directory()
    if not _build.has_sources():
        return
    # A clone's own voxelfield/ may shadow an installed package that has binaries: those serve if the sources agree.
    for distribution in importlib.metadata.distributions(name="voxelfield"):
        yield Path(str(distribution.locate_file("voxelfield")))
    # The cache comes last, because computing its path with torch takes longer than everything else here.
    cache = _build.cache_directory()
    if cache.is_dir():
        yield from sorted(folder for folder in cache.iterdir() if folder.is_dir())


def _candidates(name: str) -> Iterator[Path]:
    """Compiled modules in the order they are tried: beside this file, in an installed copy, in the build cache."""
    seen = set()
    for folder in _folders():
        for path in modules_in(folder, name):
            if path not in seen:
                seen.add(path)
                yield path


def modules_in(folder: Path, name: str) -> list[Path]:
    """Returns the compiled modules of a name that lie in a folder."""
    return [path for suffix in (".abi3.so", ".pyd", ".so") if (path := folder / f"{name}{suffix}").is_file()]


def _find(name: str) -> Path | None:
    return next((path for path in _candidates(name) if _misfit(name, path) is None), None)


class _Misfit(NamedTuple):
    """Why a module must not be loaded here, and the remedy where nothing else can be compiled."""

    reason: str  # words that follow the module's path
    remedy: str = "reinstall voxelfield"


def _misfit(name: str, path: Path) -> _Misfit | None:
    content = path.read_bytes()
    stamp = _build.find_stamp(content)
    if _build.has_sources() and (stamp is None or stamp.digest != _build.source_digest()):
        return _Misfit(f"was compiled from other sources than {_build.source_root()}")
    if damage := _build.verify_digest(path, content):
        return _Misfit(damage)
    if stamp is None:
        return _Misfit("has no stamp")
    if name == _build.CPU_MODULE:
        return None
    if complaint := _build.driver_complaint(stamp.cuda):
        return _Misfit(complaint, "update the driver")
    if stamp.variant != _build.requested_variant():
        return _Misfit(
            f"was compiled with {stamp.variant or 'no special macro'}, but NVCC_APPEND_FLAGS asks for "
            f"{_build.requested_variant() or 'none'}",
            "change that variable",
        )
    unserved = [capability for capability in _capabilities() if not stamp.architectures.run_on(capability)]
    if unserved:
        major, minor = unserved[0]
        return _Misfit(
            f"was compiled for {stamp.architectures}, but a GPU here has compute capability {major}.{minor}",
            _INSTALL_SOURCES if unserved[0] >= _build.OLDEST else "use tensors on the CPU",
        )
    return None


def _capabilities() -> list[tuple[int, int]]:
    """Returns the compute capabilities of torch's GPUs, leaving out those too old for voxelfield unless all are."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return [capability for capability in found if capability >= _build.OLDEST] or found


def _acquire(lock: FileLock, half: str) -> AcquireReturnProxy:
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        logger.warning("voxelfield: another process is compiling the %s kernels; waiting for it", half)
        return lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise KernelsUnavailableError(_no_folder(half, str(error))) from error


def _no_folder(half: str, reason: str) -> str:
    return (
        f"no compiled {half} kernels fit, and the folder to compile them into cannot be written to ({reason}); set "
        "TORCH_EXTENSIONS_DIR to a folder that can be written"
    )


def _misfits(name: str) -> list[str]:
    return [f"{path} {misfit.reason}" for path in _candidates(name) if (misfit := _misfit(name, path))]


def _wheel_error(name: str) -> str:
    """Returns one line: why a wheel's modules do not serve this machine, and the remedy."""
    for path in _candidates(name):
        if misfit := _misfit(name, path):
            return f"{path} {misfit.reason}: {misfit.remedy}"
    return f"the wheel in {_build.package_directory()} has no {name}: {_INSTALL_SOURCES}"


def _architectures() -> _build.Architectures:
    """Returns what to compile for, which must serve every GPU here.

    Raises:
        FileNotFoundError: There is no nvcc.
        ValueError: ``TORCH_CUDA_ARCH_LIST`` leaves a GPU out, nvcc compiles for none of them, or the driver is too old
            for nvcc.
    """
    home = _build.require_cuda_home()
    if complaint := _build.driver_complaint(_build.cuda_major(home)):
        raise ValueError(
            f"what {home / 'bin' / 'nvcc'} compiles {complaint}: update the driver, or set CUDA_HOME to an older CUDA"
        )
    architectures = _build.cuda_architectures(_capabilities())
    for major, minor in _capabilities():
        if not architectures.run_on((major, minor)):
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST must include this machine's GPUs, got {os.environ['TORCH_CUDA_ARCH_LIST']!r} "
                f"and a GPU of compute capability {major}.{minor}; add {major}.{minor} to it, or unset it"
            )
    return architectures


def _compile(name: str) -> Path:
    """Compiles a module into the build cache, in a process of its own, and returns it."""
    if not _build.has_sources():
        raise KernelsUnavailableError(_wheel_error(name))
    half = "CUDA" if name == _build.CUDA_MODULE else "CPU"
    environment, target = dict(os.environ), ""
    misfits = _misfits(name)
    try:
        if name == _build.CUDA_MODULE:
            architectures = _architectures()
            target = f" for {architectures}"
            environment["TORCH_CUDA_ARCH_LIST"] = architectures.torch_list()
        directory = _build.module_directory(name, _capabilities())
    except (FileNotFoundError, ValueError) as error:
        raise KernelsUnavailableError("\n".join([f"no compiled {half} kernels fit, and {error}", *misfits])) from error
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelsUnavailableError("\n".join([_no_folder(half, str(error)), *misfits])) from error
    # The operating system drops this lock when its holder dies, so that no stale lock can stop a later build.
    with _acquire(FileLock(directory / f"{name}.lock"), half):
        if (ready := _find(name)) is not None:
            return ready
        for misfit in misfits:
            logger.warning("voxelfield: ignoring %s", misfit)
        logger.warning(
            "voxelfield: no compiled %s kernels fit; compiling them once%s into %s (a minute or two on a few cores)",
            half,
            target,
            directory,
        )
        started = time.monotonic()
        # The builder sees the packages that this process sees, whatever lies in the working directory.
        search = [str(_build.package_directory().parent), *sys.path]
        start = f"import sys; sys.path[:] = {search!r}; from voxelfield.cli.command import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "build", "--only", half.lower(), "--out", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        ready = _find(name) if done.returncode == 0 else None
        if ready is None:
            # ninja passes the compilers' words on to stdout; stderr ends a traceback with what went wrong in Python.
            output = done.stdout.strip().splitlines()[-30:] + done.stderr.strip().splitlines()[-1:]
            raise KernelsUnavailableError(
                f"voxelfield could not compile its {half} kernels (exit status {done.returncode}). The end of the "
                "compiler's output:\n  "
                + "\n  ".join([*output, *misfits])
                + f"\nNeeded: {'nvcc (PATH or CUDA_HOME) and ' if half == 'CUDA' else ''}a C++17 compiler (CXX) and "
                f"ninja. Once that is fixed, `{Path(sys.executable).name} -m voxelfield build` shows the whole build."
            )
        logger.warning("voxelfield: compiled the %s kernels in %.0f s", half, time.monotonic() - started)
        return ready
