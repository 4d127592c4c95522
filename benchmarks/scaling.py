"""Time of a training step against the number of devices: measured, and as a timeline of one step.

    python benchmarks/scaling.py --measure [OVERRIDE ...] [--count N] [--rounds R] [--device cpu|cuda] [--json PATH]
    torchrun --nproc-per-node=N benchmarks/scaling.py --timeline [OVERRIDE ...] [--device cpu|cuda] [--out PATH.svg]

- ``--measure`` trains with ``devices=1`` and ``devices=N`` in turn, with another seed in each round, and prints medians
  and ratios. There are two kinds of rows for N devices: those with the same batch in all as one device, and those with
  the same batch for each device, whose sizes are N times the preset's. Seconds, PSNR and peak memory are those of
  ``metrics.json``; rays per second are the median over the second half of the steps.
- ``--timeline`` trains up to the finest level and profiles a few steps in each process. It prints how long these
  compute, exchange, and do both, their rays per second, the longest kernels, and the speed of the link. The file shows
  every stream.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _harness as harness
import _timeline
import torch
from torch import distributed

from voxelfield import processes
from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.component import Component
from voxelfield.report.record import read_history
from voxelfield.run_directory import METRICS
from voxelfield.runs.train import load_configured_scene
from voxelfield.settings import preset
from voxelfield.training.session import Session

# The files of a run that no figure needs.
WITHOUT_FILES = (
    "trainer.evaluation.save_images=false",
    "trainer.evaluation.video_frames=0",
    "trainer.evaluation.report=false",
    "trainer.model_file=none",
    "trainer.preview_every=0",
)
SAME_BATCH, SAME_BATCH_EACH = "in all", "for each"
LONGEST_KERNELS = 24

# --- what is measured -----------------------------------------------------------------------------------------------


def larger_batch(overrides: Sequence[str], device: str, count: int) -> list[str]:
    """Returns overrides that multiply the sizes of a batch by a number of devices."""
    trainer = preset(*overrides, device=device).trainer
    names = ("max_rays", "visible_samples", "candidate_samples")
    return [f"trainer.{name}={count * getattr(trainer, name)}" for name in names]


def trained(overrides: Sequence[str]) -> dict[str, float]:
    """Trains in a process of its own; returns the figures of its row.

    Raises:
        RuntimeError: Training failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "voxelfield", "train", *overrides, f"hydra.run.dir={folder}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            last = done.stdout.strip().rpartition("\n")[2]
            raise RuntimeError(f"{' '.join(command[2:])} ended with status {done.returncode}: {last}")
        metrics = json.loads(Path(folder, METRICS).read_text())
        rates = [rate for _, rate in read_history(Path(folder))["train/rays_per_second"]]
    return {
        "rays_per_second": statistics.median(rates[len(rates) // 2 :]),
        "seconds": metrics["train_seconds"],
        "psnr": metrics["psnr"],
        "gib": metrics.get("peak_gpu_gib", metrics["peak_host_gib"]),
    }


def measure(overrides: Sequence[str], device: str, count: int, rounds: int) -> list[dict[str, Any]]:
    """Trains on one device and on several, in turn; returns a row for each training."""
    common = [*overrides, *WITHOUT_FILES, f"device={device}"]
    cases = [
        (1, SAME_BATCH, []),
        (count, SAME_BATCH, []),
        (count, SAME_BATCH_EACH, larger_batch(common, device, count)),
    ]
    rows = []
    for seed in range(rounds):
        for devices, batch, sizes in cases:
            figures = trained([*common, *sizes, f"devices={devices}", f"seed={seed}"])
            rows.append({"devices": devices, "batch": batch, "seed": seed, **figures})
            print(f"devices={devices}, same batch {batch}, seed {seed}: {figures}", flush=True)
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats medians over the rounds, and their ratios to one device."""
    figures = ("rays_per_second", "seconds", "psnr", "gib")
    medians: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        key = row["devices"], row["batch"]
        same = [other for other in rows if (other["devices"], other["batch"]) == key]
        medians[key] = [statistics.median(other[name] for other in same) for name in figures]
    alone = medians[1, SAME_BATCH]
    lines = []
    for (devices, batch), (rate, seconds, psnr, gib) in medians.items():
        cells = [str(devices), batch, f"{rate:.0f}", f"{rate / alone[0]:.2f}x", f"{seconds:.1f}"]
        cells += [f"{seconds / alone[1]:.2f}", f"{psnr:.2f}", f"{psnr - alone[2]:+.2f}", f"{gib:.2f}"]
        lines.append([*cells, f"{gib / alone[3]:.2f}"])
    header = ["devices", "same batch", "rays per second", "ratio", "seconds", "ratio", "PSNR", "dB", "GiB", "ratio"]
    return harness.table(header, lines)


# --- the timeline ---------------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Returns the mean seconds of a call on the device, after two others."""
    for timed in (2, repeats):
        started = time.perf_counter()
        for _ in range(timed):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = (time.perf_counter() - started) / timed
    return elapsed


def measured_link(device: torch.device) -> tuple[float, float]:
    """Returns bytes per second between processes and seconds of a small exchange; each process must call this."""
    count = processes.count()
    part = torch.zeros((64 if device.type == "cuda" else 1) << 20, dtype=torch.uint8, device=device)
    whole, small = part.new_empty(count * len(part)), part[:4].float()
    large = seconds_of(lambda: processes.gather_later(whole, part)(), device)
    least = seconds_of(lambda: processes.sum_of(small), device)
    return (count - 1) * len(part) / max(large - least, 1e-9), least


class KeptRays(Component):
    """Counts the rays of this process that had room in its steps.

    Attributes:
        rays: Their number so far, () int64 on the device.
    """

    name = "kept_rays"

    def __init__(self, device: torch.device) -> None:
        self.rays = torch.zeros((), dtype=torch.int64, device=device)

    def losses(self, outputs: Outputs, batch: Batch) -> dict[str, torch.Tensor]:
        """Counts; there is no loss."""
        self.rays += outputs.rendering.rays_kept
        return {}


def at_finest_level(overrides: Sequence[str], device: torch.device, component: Component) -> Session:
    """Trains until all levels are in use, and until the step after an update of the occupied cells."""
    settings = preset(*overrides, device=device.type)
    settings.device, settings.trainer.small_batches = str(device), 0.0
    scene = load_configured_scene(settings, Path.cwd(), splits=("train",))
    session = Session(scene, settings, components=[component])
    trainer = settings.trainer
    # The step is captured in a graph a few steps after each change of the grids.
    first, every = max(trainer.stages[-1].step, trainer.occupancy.start) + 8, trainer.occupancy.every
    first += (trainer.occupancy.start + 1 - first) % every
    while session.step < first:
        session.train_step()
    return session


def timeline(overrides: Sequence[str], kind: str, steps: int, out: Path | None) -> None:
    """Profiles some steps in each process of torchrun's, or in this one; the first prints and draws them."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    kept = KeptRays(device)
    session = at_finest_level(overrides, device, kept)
    link = measured_link(device) if processes.count() > 1 else None
    before = int(kept.rays)
    recorded = processes.gather_objects(_timeline.record(lambda: [session.train_step() for _ in range(steps)], device))
    rays = sum(processes.gather_counts(int(kept.rays) - before)) / steps
    session.result()  # drops the captured step, without which the process group would not end
    if processes.is_first():
        if link is not None:
            bandwidth, latency = link
            print(f"link: {bandwidth / 1e9:.1f} GB/s, {1e6 * latency:.0f} microseconds for a small exchange")
        summaries = [_timeline.summary(work, steps) for work in recorded]
        lines = [[str(rank), *(f"{value:.2f}" for value in parts.values())] for rank, parts in enumerate(summaries)]
        print(harness.table(["process, ms per step", *summaries[0]], lines))
        slowest = max(parts["step"] for parts in summaries)
        print(f"\ntogether: {rays:.0f} rays a step, {rays / slowest / 1e3:.2f} million a second")
        spent: collections.Counter[str] = collections.Counter()
        for work in recorded[0]:
            spent[work.name] += (work.end - work.begin) / steps
        longest = [[name[:80], f"{value:.3f}"] for name, value in spent.most_common(LONGEST_KERNELS)]
        print("\n" + harness.table(["process 0", "ms per step"], longest))
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(_timeline.draw(recorded))
    if "RANK" in os.environ:
        distributed.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line and does what it asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_mutually_exclusive_group(required=True)
    for task in ("measure", "timeline"):
        tasks.add_argument(f"--{task}", dest="task", action="store_const", const=task)
    parser.add_argument("values", nargs="*", metavar="OVERRIDE", help="overrides of train.py's")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds it")
    parser.add_argument("--count", type=int, default=2, metavar="N", help="devices to compare with one (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="trainings of each kind (default: 3)")
    parser.add_argument("--steps", type=int, default=16, metavar="K", help="steps in the timeline (default: 16)")
    parser.add_argument("--json", type=Path, help="file for the row of each training")
    parser.add_argument("--out", type=Path, help="SVG file for the timeline")
    options = parser.parse_intermixed_args(arguments)
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.task == "timeline":
        timeline(options.values, kind, options.steps, options.out)
    else:
        rows = measure(options.values, kind, options.count, options.rounds)
        print("\n" + as_table(rows))
        if options.json:
            content = {"benchmark": "scaling", "machine": harness.machine(torch.device(kind)), "rows": rows}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
