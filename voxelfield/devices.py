"""Selection of devices, and work that several of them share."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, TypeVar

import torch

from voxelfield import processes
from voxelfield.transfers import AHEAD

Item = TypeVar("Item")
Result = TypeVar("Result")

DEVICES = r"auto|cpu|cuda(:\d{1,2})?"
"""Regular expression of the values that :func:`choose_device` accepts."""

DEVICES_IN_WORDS = "auto, cpu, cuda or cuda:<index>"
"""Description of these values for messages."""


def choose_device(requested: str) -> torch.device:
    """Returns the device for ``auto`` (CUDA if available), or the named device.

    Of several processes that train together, each gets its current CUDA device, which its launcher has set.

    Raises:
        ValueError: The name is not that of a supported device, or the CUDA device does not exist.
    """
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(DEVICES, requested) is None:
        raise ValueError(f"device must be {DEVICES_IN_WORDS}, got {requested!r}")
    device = torch.device(requested)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu where torch {torch.__version__} finds no CUDA device, got {requested!r}")
    if device.index is not None and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(
            f"device must be cuda:0 to cuda:{count - 1}, as torch finds {count} CUDA devices, got {requested!r}"
        )
    if requested == "cuda" and processes.count() > 1:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def several_devices(first: torch.device, count: int | Literal["all"]) -> list[torch.device]:
    """Returns the devices for work that ``count`` of them share.

    Args:
        first: The first of them.
        count: Their number; ``all`` for every GPU, or for one on the CPU, where each stands for a thread. The GPUs
            after ``first`` are taken before those in front of it.

    Raises:
        ValueError: ``count`` is neither ``all`` nor an int of at least 1, or there are fewer GPUs.
    """
    gpus = torch.cuda.device_count() if first.type == "cuda" else None
    if count == "all":
        count = gpus or 1
    if not isinstance(count, int) or count < 1 or (gpus is not None and count > gpus):
        allowed = "an int of at least 1" if gpus is None else f"an int from 1 to {gpus}, the number of CUDA devices,"
        raise ValueError(f"devices must be {allowed} or 'all', got {count!r}")
    if gpus is None:
        return [first] * count
    start = torch.cuda.current_device() if first.index is None else first.index
    return [torch.device("cuda", (start + offset) % gpus) for offset in range(count)]


def in_order(workers: Sequence[Callable[[Item], Result]], items: Iterable[Item]) -> Generator[Result, None, None]:
    """Yields what workers make of items, in the order of the items, of which each worker takes every n-th.

    Each of several workers runs in a thread of its own, up to a few items ahead of the result that was asked for last.
    Threads suffice to keep several GPUs busy, because launches and copies hold Python's interpreter lock only briefly,
    and they share the images and the files of one process. A single worker runs in the calling thread.

    Args:
        workers: Functions of an item, for example one per device. Contexts of the calling thread, such as
            ``torch.no_grad``, do not hold in others.
        items: The items.

    Raises:
        Exception: The error of the first item for which a worker failed; later items are given up.
    """
    if len(workers) == 1:
        yield from map(workers[0], items)
        return
    with contextlib.ExitStack() as stack:
        pools = [ThreadPoolExecutor(1, thread_name_prefix="device") for _ in workers]
        for pool in pools:
            stack.callback(pool.shutdown, cancel_futures=True)
        pending: deque[Future[Result]] = deque()
        for number, item in enumerate(items):
            if len(pending) == AHEAD * len(workers):
                yield pending.popleft().result()
            turn = number % len(workers)
            pending.append(pools[turn].submit(workers[turn], item))
        while pending:
            yield pending.popleft().result()
