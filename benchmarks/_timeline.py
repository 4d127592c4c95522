"""Timeline of a training step in each process: when it computes, when it exchanges, and how much of both overlaps."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
from _plot import BLUE, INK, ORANGE, STYLE
from matplotlib.figure import Figure
from torch.profiler import ProfilerActivity, profile

from voxelfield import processes

Interval = tuple[float, float]
"""Beginning and end, in milliseconds."""

# What is timed on each kind of device. On the CPU, gloo works in threads of its own.
_CATEGORIES = {"cuda": {"kernel", "gpu_memcpy", "gpu_memset"}, "cpu": {"cpu_op", "user_annotation"}}
_EXCHANGES = ("nccl", "gloo:")


@dataclass(frozen=True)
class Work:
    """What a process did at one time: its name, its stream or thread, and when."""

    name: str
    stream: int
    begin: float
    end: float

    @property
    def exchanges(self) -> bool:
        """Whether this is communication between processes."""
        return self.name.lower().startswith(_EXCHANGES) or "barrier_kernel" in self.name


def record(steps: Callable[[], object], device: torch.device) -> list[Work]:
    """Profiles a function in all processes at once; returns this one's work, in milliseconds from the first of it."""
    activities = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    with profile(activities=activities):  # the first one loads libraries, for which other processes would wait
        pass
    processes.barrier()
    with profile(activities=activities) as profiler:
        steps()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return work_of(events, device.type)


def work_of(events: Iterable[dict[str, Any]], kind: str) -> list[Work]:
    """Returns the work that a Chrome trace records of a kind of device, in the order in which it began."""
    timed = [event for event in events if event.get("cat") in _CATEGORIES[kind]]
    first = min((event["ts"] for event in timed), default=0.0)
    found = [
        Work(
            event["name"],
            event["args"]["stream"] if kind == "cuda" else event["tid"],
            (event["ts"] - first) / 1e3,
            (event["ts"] - first + event["dur"]) / 1e3,
        )
        for event in timed
    ]
    return sorted(found, key=lambda work: work.begin)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the intervals without overlaps, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Returns the time that intervals cover, counting overlaps once."""
    return sum(end - begin for begin, end in union(intervals))


def summary(work: Sequence[Work], steps: int) -> dict[str, float]:
    """Returns milliseconds per step: in all, computing, exchanging, both at once, and neither.

    An exchange includes the time in which it waits for other processes.
    """
    computing = [(piece.begin, piece.end) for piece in work if not piece.exchanges]
    exchanging = [(piece.begin, piece.end) for piece in work if piece.exchanges]
    whole = max((piece.end for piece in work), default=0.0)
    busy = length([*computing, *exchanging])
    parts = {
        "step": whole,
        "computing": length(computing),
        "exchanging": length(exchanging),
        "both": length(computing) + length(exchanging) - busy,
        "idle": whole - busy,
    }
    return {name: value / steps for name, value in parts.items()}


def draw(processes: Sequence[Sequence[Work]]) -> str:
    """Draws the streams of each process, computation and exchanges in two colours; returns the text of an SVG file."""
    streams = [(rank, stream) for rank, work in enumerate(processes) for stream in sorted({w.stream for w in work})]
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(9.0, 0.6 + 0.35 * len(streams)), layout="constrained")
        axes = drawn.subplots()
        for row, (rank, stream) in enumerate(streams):
            for exchanges, color in ((False, BLUE), (True, ORANGE)):
                spans = union(
                    (w.begin, w.end) for w in processes[rank] if w.stream == stream and w.exchanges == exchanges
                )
                axes.broken_barh([(begin, end - begin) for begin, end in spans], (row - 0.4, 0.8), facecolors=color)
        axes.set_yticks(range(len(streams)), [f"process {rank}, stream {stream}" for rank, stream in streams])
        for row, (above, below) in enumerate(pairwise(streams)):
            if above[0] != below[0]:
                axes.axhline(row + 0.5, color=INK, linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        text = io.StringIO()
        drawn.savefig(text, format="svg", transparent=True, dpi=100, metadata={"Date": None})
    return text.getvalue()
