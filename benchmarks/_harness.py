"""Shared code of the benchmarks: options, timing, bandwidths and description of the machine, tables and JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Allows benchmarks to run in a clone that was never installed; an installed package takes precedence.
if importlib.util.find_spec("voxelfield") is None:
    sys.path.append(str(Path(__file__).resolve().parent.parent))

Call = Callable[[], object]

_CALLS_PER_BATCH = 10
_SLEEP_CYCLES_PER_SECOND = 2_000_000_000
_CPU_CACHE_BYTES = 64 << 20
_L2_PASSES = 64


@dataclass(frozen=True)
class Effort:
    """Duration of a measurement: as many repeats as fit in ``seconds``, within the two bounds."""

    seconds: float
    min_repeats: int
    max_repeats: int = 200

    def repeats(self, estimate: float) -> int:
        """Returns the number of repeats for a call of about ``estimate`` seconds."""
        return max(self.min_repeats, min(self.max_repeats, int(self.seconds / max(estimate, 1e-9))))


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, 10th and 90th percentile, and the host's time to enqueue it."""

    median: float
    low: float
    high: float
    host: float
    repeats: int


def effort(device: torch.device, quick: bool) -> Effort:
    """Returns the effort of a full or a quick run."""
    if device.type == "cuda":
        return Effort(seconds=0.05, min_repeats=5) if quick else Effort(seconds=0.2, min_repeats=20)
    return Effort(seconds=0.1, min_repeats=1) if quick else Effort(seconds=0.7, min_repeats=3)


def measure(calls: Sequence[Call], device: torch.device, how: Effort) -> Timing:
    """Times calls that do the same work on different inputs, in turn, so that inputs are not cached between calls.

    On CUDA each call is enclosed by two events. The device is kept busy while calls are enqueued in small batches, so
    that the events measure device time only; the host's time to enqueue a call is reported separately.

    Args:
        calls: One callable for each set of inputs; its result is freed outside the timed region.
        device: Device of the work.
        how: Duration of the measurement.

    Returns:
        The statistics over all repeats.
    """
    times, host = _cuda_times(calls, how) if device.type == "cuda" else _cpu_times(calls, how)
    ordered = sorted(times)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    return Timing(statistics.median(ordered), low, high, host, len(ordered))


def _cpu_times(calls: Sequence[Call], how: Effort) -> tuple[list[float], float]:
    def timed(call: Call) -> float:
        started = time.perf_counter()
        result = call()
        elapsed = time.perf_counter() - started
        del result
        return elapsed

    first = timed(calls[0])
    repeats = how.repeats(first)
    # A second warm-up is cheap for short calls, and long calls do not need it.
    estimate = min(first, timed(calls[-1])) if repeats > how.min_repeats else first
    times = [1e3 * timed(calls[i % len(calls)]) for i in range(how.repeats(estimate))]
    return times, statistics.median(times)


def _cuda_times(calls: Sequence[Call], how: Effort) -> tuple[list[float], float]:
    for call in calls:
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    # If calls are so long that a batch would exceed the effort, the host's overhead does not matter.
    batch = max(1, min(_CALLS_PER_BATCH, int(how.seconds / (time.perf_counter() - started))))
    started = time.perf_counter()
    for i in range(batch):
        calls[i % len(calls)]()
    host = (time.perf_counter() - started) / batch
    torch.cuda.synchronize()
    estimate = (time.perf_counter() - started) / batch

    head_start = int(min(1.5 * host * batch, 0.05) * _SLEEP_CYCLES_PER_SECOND)
    pairs = []
    for i in range(how.repeats(estimate)):
        if i % batch == 0:
            torch.cuda.synchronize()
            torch.cuda._sleep(head_start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        calls[i % len(calls)]()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs], 1e3 * host


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes per second, read plus written, of a large copy within the device's memory.

    This is an upper bound, so it is computed from a fast copy (the 10th percentile) instead of the median.
    """
    size = (1 << 30) if device.type == "cuda" else (1 << 28)
    source = torch.rand(size // 4, device=device)
    target = torch.rand_like(source)
    how = Effort(seconds=1.0, min_repeats=20) if device.type == "cuda" else Effort(seconds=0.5, min_repeats=5)
    timing = measure([lambda: target.copy_(source), lambda: source.copy_(target)], device, how)
    return 2 * size / (timing.low * 1e-3)


def l2_bytes(device: torch.device) -> int:
    """Returns the size of a GPU's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def l2_bandwidth(device: torch.device) -> float:
    """Returns the bandwidth in bytes per second of repeated passes over a buffer within a GPU's L2 cache.

    This is the better of reading (a sum) and of reading and writing (a copy), for buffers of an eighth and a quarter of
    the cache. Many passes are replayed as one CUDA graph, to hide the host's launch overhead. As in
    :func:`copy_bandwidth`, it is computed from a fast pass.
    """
    cache = l2_bytes(device)
    best = 0.0
    for share in (8, 4):
        source = torch.rand(cache // share // 4, device=device)
        target = torch.empty_like(source)
        total = torch.empty((), device=device)
        passes: list[tuple[Call, int]] = [
            (partial(torch.neg, source, out=target), 2 * source.nbytes),
            (partial(torch.sum, source, dim=0, out=total), source.nbytes),
        ]
        for once, moved in passes:
            once()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(_L2_PASSES):
                    once()
            timing = measure([graph.replay], device, Effort(seconds=0.1, min_repeats=20))
            best = max(best, _L2_PASSES * moved / (timing.low * 1e-3))
    return best


def input_sets(bytes_per_set: int, device: torch.device, min_sets: int = 2) -> int:
    """Returns the number of input sets to rotate through so that they exceed the last-level cache several times."""
    cache = _CPU_CACHE_BYTES
    if device.type == "cuda":
        cache = l2_bytes(device)
    return max(min_sets, min(32, math.ceil(3 * cache / max(bytes_per_set, 1))))


def granule(device: torch.device) -> int:
    """Returns the size of a memory transfer in bytes: a sector of the GPU's L2, or a cache line of the CPU."""
    return 32 if device.type == "cuda" else 64


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Returns ``|value - reference| / |reference|`` in the Euclidean norm (NaN if either contains NaN)."""
    return float(torch.dist(value, reference) / torch.linalg.vector_norm(reference))


def check(label: str, error: float, tolerance: float) -> float:
    """Returns the error if it is within the tolerance; exits otherwise (NaN never passes)."""
    if not error < tolerance:
        raise SystemExit(f"{label} is off by {error:.1e} (relative, tolerance {tolerance:.0e})")
    return error


def machine(device: torch.device) -> dict[str, Any]:
    """Describes hardware and software: CPU, threads, GPU, driver, and versions of Python, torch and CUDA."""
    described: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": None,
        "driver": None,
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
        described["driver"] = _driver_version()
    return described


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return named[1] if named else platform.processor()


def _driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip().splitlines()[0]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats rows under a header in aligned columns, the first one left-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *others])

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


@dataclass(frozen=True)
class Session:
    """One run of a benchmark: device, effort, and properties of the machine."""

    device: torch.device
    how: Effort
    machine: dict[str, Any]
    bandwidth: float
    l2_bandwidth: float | None

    def announce(self) -> None:
        """Prints the machine and its bandwidths."""
        print("\n" + ", ".join(f"{key} {value}" for key, value in self.machine.items() if value is not None))
        cache = "" if self.l2_bandwidth is None else f", within L2 {self.l2_bandwidth / 1e9:.0f} GB/s"
        print(f"copy bandwidth {self.bandwidth / 1e9:.1f} GB/s{cache}, bytes read and written; times are medians")

    def write(self, path: Path, benchmark: str, method: str | None, rows: list[dict[str, Any]]) -> None:
        """Writes all results of the run to a JSON file, creating its folder."""
        content = {
            "benchmark": benchmark,
            "machine": self.machine,
            "copy_bytes_per_second": self.bandwidth,
            "l2_bytes_per_second": self.l2_bandwidth,
            "effort": self.how,
            "method": method,
            "rows": rows,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, default=asdict) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a command-line parser with the options that all benchmarks share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds it")
    options.add_argument("--threads", type=int, help="of torch on the CPU; default: torch's own choice")
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--only", default="", metavar="SUBSTRING", help="run the rows whose name contains it")
    options.add_argument("--json", type=Path, help="file for every figure")
    return options


def start(options: argparse.Namespace) -> Session:
    """Selects device and threads from the command line and measures the machine's bandwidths."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return Session(
        device,
        effort(device, options.quick),
        machine(device),
        copy_bandwidth(device),
        l2_bandwidth(device) if device.type == "cuda" else None,
    )
