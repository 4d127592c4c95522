"""Execution of work on a device: its time, deterministic algorithms, and replay as a CUDA graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from voxelfield.installed import without_garbage_collection

# Number of calls before the first capture; the first ones allocate memory that later ones reuse.
_WARM_UP = 3


def synchronized_time(device: torch.device) -> float:
    """Waits until the device has finished all pending work, and returns the time on a clock in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock:
    """Counts the seconds of work on a device, without pauses: ``seconds`` are those when it was last read.

    Its methods wait until the device has finished all pending work, unless ``wait`` is False.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = self._lap = 0.0

    def start(self, *, wait: bool = True) -> None:
        """Counts on from here."""
        self._began = self._now(wait) - self.seconds

    def read(self, *, wait: bool = True) -> None:
        """Updates ``seconds``."""
        self.seconds = self._now(wait) - self._began

    def _now(self, wait: bool) -> float:
        return synchronized_time(self._device) if wait else time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock during a block."""
        self.read()
        yield
        self.start()

    def lap(self) -> float:
        """Returns the seconds between the last two laps, of which this call is one."""
        since, self._lap = self.seconds - self._lap, self.seconds
        return since


@contextmanager
def reproducible(wanted: bool) -> Iterator[None]:
    """Makes torch and voxelfield choose deterministic algorithms in a block, for the whole process, if wanted.

    On CUDA, sums over samples are then computed in a fixed order, which is slower. cuBLAS reads
    ``CUBLAS_WORKSPACE_CONFIG`` when it is first used, so the block must begin before that.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class GraphedCall:
    """Calls a function without arguments: directly at first, then by replaying a CUDA graph, if it ``captures`` one.

    The function must not synchronise with the device, and must read its inputs from the same tensors in each call.
    Random numbers from torch's generators differ between replays. On other devices than CUDA's, and without a capture,
    the function is always called directly.
    """

    def __init__(self, function: Callable[[], None], device: torch.device, captures: bool = True) -> None:
        self._function = function
        self._device = device
        self._captures = captures and device.type == "cuda"
        self._calls_left = _WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None

    def discard(self) -> None:
        """Drops the graph: call this when the function reads other tensors, or before a process group ends.

        The next call captures it again.
        """
        self._graph = None

    def __call__(self) -> None:
        """Calls the function once."""
        if not self._captures:
            self._function()
        elif self._calls_left > 0:
            self._on_side_stream()
            self._calls_left -= 1
        else:
            if self._graph is None:
                self._graph = self._captured()
            self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # torch's default stream for captures belongs to the device that captured first.
        stream = torch.cuda.Stream(self._device)
        # Other threads, such as a viewer's, may use the device on their own streams at the same time.
        capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
        # Garbage may be memory that GPUs share, which must not be freed meanwhile: an attempt would end the process.
        try:
            with torch.cuda.device(self._device), without_garbage_collection(), capture:
                self._function()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise RuntimeError(
                "a training step on CUDA must not wait for the device, as a comparison of tensors in a loss or a "
                f"component does, got {str(error).splitlines()[0]!r}: trainer.cuda_graph=false runs it without a graph"
            ) from error
        # Capturing resets the graph's random state on that stream, which must not happen after the replay.
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graph

    def _on_side_stream(self) -> None:
        # In a capture, autograd runs the backward pass on a side stream too, so no tensors of the default stream may be
        # involved.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._function()
        torch.cuda.current_stream(self._device).wait_stream(stream)
