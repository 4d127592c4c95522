"""Running the same device work again and again without launching it piece by piece."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Steps that run before the capture: the first allocate what later ones reuse.
_WARM_UP = 3


class GraphedCall:
    """Calls a function of no arguments: as it is at first, then from a CUDA graph.

    The function must not wait for the device, and must find its inputs in the same tensors each time; torch's random
    numbers are drawn anew in each replay.

    Args:
        function: What to call.
        device: A CUDA device; on any other the function is simply called.
    """

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self._function = function
        self._device = device
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Calls the function once."""
        if self._device.type != "cuda":
            self._function()
        elif self._graph is not None:
            self._graph.replay()
        elif self._calls < _WARM_UP:
            self._on_side_stream()
            self._calls += 1
        else:
            graph = torch.cuda.CUDAGraph()
            # torch's own stream for captures is one of the device that captured first.
            stream = torch.cuda.Stream(self._device)
            # Other threads, such as a viewer's, may meanwhile use the device on streams of their own.
            capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
            with torch.cuda.device(self._device), capture:
                self._function()
            # Capturing set the graph's random numbers to zero there: a replay that overtook it would draw them anew.
            torch.cuda.current_stream(self._device).wait_stream(stream)
            self._graph = graph
            graph.replay()

    def _on_side_stream(self) -> None:
        # Where autograd runs the backward pass of a capture, too: it must not meet tensors of the default stream.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._function()
        torch.cuda.current_stream(self._device).wait_stream(stream)
