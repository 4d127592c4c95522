"""Finding, compiling and loading the extension's modules.

This happens at the first use of an op, not when voxelfield is imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import url2pathname

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout

from voxelfield._build import architectures, compiling, sources

logger = logging.getLogger("voxelfield")

_OLDEST_TORCH = (2, 10)
_INSTALL_SOURCES = "install voxelfield from its sources, which are compiled on first use"

_loading = threading.RLock()
_loaded: dict[str, Path] = {}
_ready: set[str] = set()  # types of devices
_failed: dict[str, str] = {}
_registrations: list[Callable[[], None]] = []


class KernelsUnavailableError(RuntimeError):
    """No kernels can be loaded on this machine; the message says why."""


def when_loaded(register: Callable[[], None]) -> None:
    """Runs a function that registers fakes and derivatives, which need the operators' schemas to exist.

    That is as soon as they do: at once if the CPU module is loaded already.
    """
    with _loading:
        if sources.CPU_MODULE in _loaded:
            register()
        else:
            _registrations.append(register)


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
    if device_type in _ready:
        return True
    if device_type == "meta":
        device_type = "cpu"  # shapes come from the fake kernels, which need the schemas only
    if device_type not in {"cpu", "cuda"}:
        raise NotImplementedError(f"voxelfield has kernels for cpu and cuda tensors, got a tensor on {device_type!r}")
    with _loading:
        _ensure_module(sources.CPU_MODULE)
        # Without a visible GPU, "cuda" tensors are fake ones, and the schemas suffice.
        if device_type == "cuda" and sources.CUDA_MODULE not in _loaded and _capabilities():
            _ensure_module(sources.CUDA_MODULE)
    if device_type == "cpu" or sources.CUDA_MODULE in _loaded:
        _ready.add(device_type)
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
        fitting, misfits = _find(name)
        path = fitting or _compile(name, misfits)
        torch.ops.load_library(path)
    except (RuntimeError, OSError, ValueError) as error:
        # Ops are called thousands of times: later calls raise the same error at once instead of compiling again.
        _failed[name] = str(error)
        raise
    _loaded[name] = path
    if name == sources.CPU_MODULE:
        while _registrations:
            _registrations.pop(0)()


def _check_torch() -> None:
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise KernelsUnavailableError(
            f"voxelfield needs torch {oldest} or later, got {torch.__version__}: pip install 'torch>={oldest}'"
        )


def _folders() -> Iterator[Path]:
    """Yields the package's folder, an installed copy, its source tree if editable, and the cache."""
    yield sources.package_directory()
    if not sources.has_sources():
        return
    # In a clone, its voxelfield/ shadows an installed package, whose binaries serve if the sources agree.
    for distribution in importlib.metadata.distributions(name="voxelfield"):
        yield Path(str(distribution.locate_file("voxelfield")))
        # An editable install leaves its binaries in the tree that it was made from.
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            yield Path(url2pathname(origin["url"].removeprefix("file:")), "voxelfield")
    # The cache comes last, because computing its path with torch takes longer than everything else here.
    cache = compiling.cache_directory()
    if cache.is_dir():
        yield from sorted(folder for folder in cache.iterdir() if folder.is_dir())


def modules_in(folder: Path, name: str) -> list[Path]:
    """Returns the compiled modules of a name in a folder."""
    return [path for suffix in (".abi3.so", ".pyd", ".so") if (path := folder / f"{name}{suffix}").is_file()]


class _Misfit(NamedTuple):
    """Why a module must not be loaded here, and the remedy where nothing else can be compiled."""

    reason: str
    remedy: str = "reinstall voxelfield"


def _find(name: str) -> tuple[Path | None, list[_Misfit]]:
    """Returns the first module in :func:`_folders` that fits, or None, and why those before it do not."""
    misfits: dict[Path, _Misfit] = {}
    for folder in _folders():
        for path in modules_in(folder, name):
            if path not in misfits:
                misfit = _misfit(name, path)
                if misfit is None:
                    return path, [*misfits.values()]
                misfits[path] = misfit._replace(reason=f"{path} {misfit.reason}")
    return None, [*misfits.values()]


def _misfit(name: str, path: Path) -> _Misfit | None:
    """Returns why a module must not be loaded here, None if it fits."""
    content = path.read_bytes()
    stamp = sources.find_stamp(content)
    if sources.has_sources() and (stamp is None or stamp.digest != sources.source_digest()):
        return _Misfit(f"was compiled from other sources than {sources.source_root()}")
    if damage := sources.verify_digest(path, content):
        return _Misfit(damage)
    if stamp is None:
        return _Misfit("has no stamp")
    if name == sources.CPU_MODULE:
        return None
    if complaint := architectures.driver_complaint(stamp.cuda):
        return _Misfit(complaint, "update the driver")
    if stamp.variant != sources.requested_variant():
        return _Misfit(
            f"was compiled with {stamp.variant or 'no special macro'}, but NVCC_APPEND_FLAGS asks for "
            f"{sources.requested_variant() or 'none'}",
            "change that variable",
        )
    unserved = [capability for capability in _capabilities() if not stamp.architectures.run_on(capability)]
    if unserved:
        major, minor = unserved[0]
        return _Misfit(
            f"was compiled for {stamp.architectures}, but a GPU here has compute capability {major}.{minor}",
            _INSTALL_SOURCES if unserved[0] >= architectures.OLDEST else "use tensors on the CPU",
        )
    return None


def _capabilities() -> list[tuple[int, int]]:
    """Returns the compute capabilities of torch's GPUs, leaving out those too old for voxelfield unless all are."""
    found = architectures.visible_capabilities()
    return [capability for capability in found if capability >= architectures.OLDEST] or list(found)


def _lock(directory: Path, name: str, half: str) -> AcquireReturnProxy:
    """Creates a folder and locks a module in it. The system drops the lock when its process dies."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / f"{name}.lock")
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            logger.warning("voxelfield: another process is compiling the %s kernels; waiting for it", half)
            return lock.acquire()
    except (OSError, NotImplementedError) as error:
        raise KernelsUnavailableError(
            f"no compiled {half} kernels fit, and the folder to compile them into cannot be written to ({error}); set "
            "TORCH_EXTENSIONS_DIR to a folder that can be written"
        ) from error


def _architectures() -> architectures.Architectures:
    """Returns the architectures to compile for, which must serve every GPU of this machine."""
    home = architectures.require_cuda_home()
    if complaint := architectures.driver_complaint(architectures.cuda_major(home)):
        raise ValueError(
            f"code of {home / 'bin' / 'nvcc'} {complaint}: update the driver, or set CUDA_HOME to an older CUDA"
        )
    chosen = compiling.cuda_architectures()
    for major, minor in _capabilities():
        if not chosen.run_on((major, minor)):
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST must include this machine's GPUs, got {os.environ['TORCH_CUDA_ARCH_LIST']!r} "
                f"and a GPU of compute capability {major}.{minor}; add {major}.{minor} to it, or unset it"
            )
    return chosen


def _compile(name: str, misfits: list[_Misfit]) -> Path:
    """Compiles a module into the build cache, in a separate process, and returns it."""
    if not sources.has_sources():
        if misfits:
            raise KernelsUnavailableError(f"{misfits[0].reason}: {misfits[0].remedy}")
        folder = sources.package_directory()
        raise KernelsUnavailableError(f"the wheel in {folder} has no {name}: {_INSTALL_SOURCES}")
    half, reasons = "CUDA" if name == sources.CUDA_MODULE else "CPU", [misfit.reason for misfit in misfits]
    environment, target = dict(os.environ), ""
    try:
        if name == sources.CUDA_MODULE:
            chosen = _architectures()
            target = f" for {chosen}"
            environment["TORCH_CUDA_ARCH_LIST"] = chosen.torch_list()
        directory = compiling.module_directory(name)
    except (FileNotFoundError, ValueError) as error:
        raise KernelsUnavailableError("\n".join([f"no compiled {half} kernels fit, and {error}", *reasons])) from error
    with _lock(directory, name, half):
        if (ready := _find(name)[0]) is not None:
            return ready
        for reason in reasons:
            logger.warning("voxelfield: ignoring %s", reason)
        logger.warning(
            "voxelfield: no compiled %s kernels fit; compiling them once%s into %s (a minute or two on a few cores)",
            half,
            target,
            directory,
        )
        started = time.monotonic()
        # The builder sees the packages that this process sees, regardless of the working directory.
        search = [str(sources.package_directory().parent), *sys.path]
        start = f"import sys; sys.path[:] = {search!r}; from voxelfield.cli.command import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "build", "--only", half.lower(), "--out", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        ready = _find(name)[0] if done.returncode == 0 else None
        if ready is None:
            # ninja prints the compilers' messages on stdout; stderr ends with the last line of a traceback of Python.
            output = done.stdout.strip().splitlines()[-30:] + done.stderr.strip().splitlines()[-1:]
            raise KernelsUnavailableError(
                f"voxelfield could not compile its {half} kernels (exit status {done.returncode}). The end of the "
                "compiler's output:\n  "
                + "\n  ".join([*output, *reasons])
                + f"\nNeeded: {'nvcc (PATH or CUDA_HOME) and ' if half == 'CUDA' else ''}a C++17 compiler (CXX) and "
                f"ninja. Once that is fixed, `{Path(sys.executable).name} -m voxelfield build` shows the whole build."
            )
        logger.warning("voxelfield: compiled the %s kernels in %.0f s", half, time.monotonic() - started)
        return ready
