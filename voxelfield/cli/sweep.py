"""The GPUs of a sweep whose launcher runs several jobs at once: each job has one of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout

# Seconds between two looks for a free GPU.
_PATIENCE = 1.0


@contextlib.contextmanager
def own_device(requested: str, folder: Path) -> Iterator[str]:
    """Holds a GPU that no other job of a sweep holds, once there is one.

    Files in the folder of the sweep are locked, because Hydra's launchers neither know GPUs nor say where a job runs:
    joblib gives a process another job as soon as it has finished one, so that the number of a job determines nothing,
    and CUDA reads ``CUDA_VISIBLE_DEVICES`` only once in a process. A lock ends with its process, in whatever way that
    ends. GPUs have unique names, so a sweep may also run on several machines with a folder in common.

    Args:
        requested: The device as configured; one other than ``auto`` and ``cuda`` is yielded as it is, as is the CPU.
        folder: Folder of the sweep.

    Yields:
        The device to configure instead, such as ``cuda:1``.
    """
    if requested not in ("auto", "cuda") or not torch.cuda.is_available():
        yield requested
        return
    names = [torch.cuda.get_device_properties(index).uuid for index in range(torch.cuda.device_count())]
    with contextlib.ExitStack() as held:
        yield _acquire([FileLock(folder / f".{name}.lock") for name in names], held)


def _acquire(locks: list[FileLock], held: contextlib.ExitStack) -> str:
    """Waits for one of the locks of GPUs, and returns the name of its device."""
    while True:
        for index, lock in enumerate(locks):
            with contextlib.suppress(Timeout):
                held.enter_context(lock.acquire(timeout=0))
                return f"cuda:{index}"
        time.sleep(_PATIENCE)
