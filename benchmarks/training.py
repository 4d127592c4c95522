"""Trains a scene at several sizes: time, quality and memory against the finest resolution and samples per step.

    python benchmarks/training.py [OVERRIDE ...] [--scene NAME] [--data-root DIR] [--hold-out N]
                                  [--finest-resolution [N ...]] [--samples [N ...]] [--device cpu|cuda] [--threads N]
                                  [--quick] [--only SUBSTRING] [--json PATH]
    python benchmarks/training.py --plot PATH.json [PATH.json ...] --out PATH.svg

The configuration is that of ``python train.py scene=NAME OVERRIDE ...`` on the device. One of the two quantities is
varied at a time, around the preset's own finest resolution and samples per step; ``--finest-resolution`` and
``--samples`` set the values, and without a number they disable that sweep.

- Levels are those of ``model.resolutions``, except its last, that are coarser than the finest resolution, and the
  finest resolution itself; levels that are summed keep their ratios to it instead; a model without levels has this
  resolution at the end. ``trainer.stages`` are adapted: those up to the finest resolution are kept, the last one at it.
- ``trainer.max_rays`` and ``trainer.candidate_samples`` scale with ``trainer.visible_samples``. "rays" is the number of
  rays per step that fit, on average since the last record: finer levels have more samples along a ray, so fewer rays
  fit.
- Every N-th training view (``--hold-out``) is held out; PSNR and SSIM are computed over these views, rendered as in the
  trainer's evaluation. The test split is never read.
- Seconds are metrics.json's ``train_seconds``: from images in memory to the last step, including upload, building the
  field and capturing graphs. GiB is the peak memory that torch held on the device during this time.
- Each training has its own process and writes no checkpoint. If one fails, which happens before it starts if the
  device's memory is insufficient, its row contains the error and the sweep continues.
- The preset itself comes first, then sizes in order of distance from it; the JSON file is written after each training.
- ``--quick`` leaves out sizes larger than the preset. ``--plot`` prints and plots the rows of all its files; rows of
  later files replace those of earlier ones.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import _harness as harness
import _plot
import torch

from voxelfield._library import ensure_loaded
from voxelfield.components.logger import NullLogger
from voxelfield.datasets.scene import Split
from voxelfield.runs.train import load_configured_scene
from voxelfield.settings import RunConfig, preset
from voxelfield.training.session import Session

FINEST_RESOLUTIONS = {"cuda": (128, 192, 512, 768, 1024), "cpu": (32, 64, 96)}
SAMPLE_FACTORS = (0.25, 0.5, 1, 2, 4)
# Settings that rows must share to form one curve.
SETTING = ("scene", "overrides", "steps", "hold_out")


class Size(NamedTuple):
    """The quantities that vary between trainings."""

    finest_resolution: int
    samples: int

    @property
    def label(self) -> str:
        """Returns the size as printed."""
        return f"finest resolution {self.finest_resolution}, samples {self.samples}"

    def sweeps(self, own: Size) -> list[str]:
        """Returns the sweeps around the preset's own size that include this size."""
        part_of = {
            "finest_resolution": self.samples == own.samples,
            "samples": self.finest_resolution == own.finest_resolution,
        }
        return [sweep for sweep, member in part_of.items() if member]

    def distance(self, own: Size) -> float:
        """Returns the distance from the preset's own size in powers of two."""
        return sum(abs(math.log2(mine / theirs)) for mine, theirs in zip(self, own, strict=True))


def own_size(settings: RunConfig) -> Size:
    """Returns the size of unmodified settings."""
    return Size(max(settings.trainer.resolutions), settings.trainer.visible_samples)


def sizes(own: Size, resolutions: Sequence[int], samples: Sequence[int]) -> list[Size]:
    """Returns the trainings of both sweeps, without duplicates, in order of distance from the preset's own size."""
    found = [*(Size(n, own.samples) for n in resolutions), *(Size(own.finest_resolution, n) for n in samples)]
    return sorted(dict.fromkeys(found), key=lambda size: size.distance(own))


def resized(settings: RunConfig, size: Size) -> RunConfig:
    """Returns a copy of settings at another size."""
    finest = size.finest_resolution
    model, trainer = settings.model, settings.trainer
    resolutions = getattr(model, "resolutions", None)
    if resolutions is not None:
        *coarser, last = resolutions
        if all(finer % level == 0 for level, finer in itertools.pairwise(resolutions)):  # nested, and to stay so
            coarser = [finest * level // last for level in coarser]
        changes: dict[str, Any] = {"resolutions": [*(level for level in coarser if level < finest), finest]}
        model = replace(model, **changes)
    kept = list(itertools.takewhile(lambda stage: stage.resolution < finest, trainer.stages[:-1]))
    factor = size.samples / trainer.visible_samples
    trainer = replace(
        trainer,
        finest_resolution=finest,
        stages=[*kept, replace(trainer.stages[len(kept)], resolution=finest)],
        max_rays=max(1, round(trainer.max_rays * factor)),
        candidate_samples=max(1, round(trainer.candidate_samples * factor)),
        visible_samples=size.samples,
    )
    return replace(settings, model=model, trainer=trainer)


# --- one training ---------------------------------------------------------------------------------------------------


class _Records(NullLogger):
    """Keeps the last value of each scalar."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.last.update(values)


def divide(split: Split, every: int) -> tuple[Split, Split]:
    """Returns the training views, and the held-out ones: every ``every``-th view from the first on."""

    def chosen(views: list[int]) -> Split:
        masks = None if split.masks is None else split.masks[views]
        return Split(split.images[views], split.cameras[views], tuple(split.names[view] for view in views), masks)

    views = range(len(split))
    return chosen([view for view in views if view % every]), chosen(list(views[::every]))


def train(settings: RunConfig, hold_out: int) -> dict[str, Any]:
    """Trains and evaluates in this process; returns the figures of a row.

    Args:
        settings: Settings of the run; ``data.root`` is relative to the working directory.
        hold_out: Every ``hold_out``-th training view is held out.

    Raises:
        ValueError: Memory is insufficient, which is detected before device memory is allocated.
        RuntimeError: Training failed.
    """
    scene = load_configured_scene(settings, Path.cwd(), splits=("train",))
    learned, held_out = divide(scene.train, hold_out)
    divided = replace(scene, splits={"train": learned, "held out": held_out})
    records = _Records()
    # No output folder, because the largest checkpoints would fill disks and are not needed.
    session = Session(divided, settings, logger=records)
    device = session.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if not session.fit():
        raise RuntimeError(f"interrupted after step {session.step}")
    # Read before the evaluation, which is not part of training.
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    renderer = session.renderer()
    evaluation = session.evaluate("held out", progress=False)
    return {
        "train_seconds": session.train_seconds,
        "ms_per_step": 1e3 * session.train_seconds / session.step,
        "rays": records.last["train/rays_per_step"],
        "psnr": evaluation.psnr,
        "ssim": evaluation.ssim,
        "views": list(evaluation.names),
        "drawn_by": renderer.backend,
        "peak_gib": peak,
        "parameters": sum(parameter.numel() for parameter in session.field.parameters()),
        "resolution": list(session.field.grid.resolution),
    }


def train_apart(settings: RunConfig, hold_out: int) -> dict[str, Any]:
    """Trains in a separate process, so that no memory, cache or broken context affects the next training.

    Returns:
        The result of :func:`train`, or the first line of its error as ``error``.
    """
    threads = torch.get_num_threads()
    with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (threads,)) as process:
        try:
            return process.submit(train, settings, hold_out).result()
        except (RuntimeError, ValueError, FloatingPointError) as error:
            return {"error": str(error).partition("\n")[0] or repr(error)}


# --- tables and plots -----------------------------------------------------------------------------------------------


def size_of(row: dict[str, Any]) -> Size:
    """Returns the size of a row."""
    return Size(row["finest_resolution"], row["samples"])


def as_table(rows: list[dict[str, Any]]) -> str:
    """Formats a line for each training, by size, followed by the errors."""
    lines, errors = [], []
    for row in sorted(rows, key=size_of):
        cells = [str(row["finest_resolution"]), str(row["samples"]), str(row["steps"])]
        if "error" in row:
            errors.append(f"{size_of(row).label}: {row['error']}")
            lines.append([*cells, *["-"] * 7])
            continue
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        lines.append(
            [
                *cells,
                f"{row['rays']:.0f}",
                f"{row['train_seconds']:.1f}",
                f"{row['ms_per_step']:.2f}",
                f"{row['psnr']:.2f}",
                f"{row['ssim']:.4f}",
                peak,
                f"{row['parameters'] / 1e6:.1f}M",
            ]
        )
    header = ["resolution", "samples", "steps", "rays", "seconds", "ms per step", "PSNR", "SSIM", "GiB", "parameters"]
    return "\n".join([harness.table(header, lines), *errors])


def draw(rows: list[dict[str, Any]]) -> str:
    """Plots seconds, PSNR and GiB, one above the other, against the finest resolution and samples per step.

    Raises:
        ValueError: No training was completed, or the rows have different settings.
    """
    trained = sorted((row for row in rows if "error" not in row), key=size_of)
    if not trained:
        raise ValueError("there is no training to draw")
    for name in SETTING:
        if any(row[name] != trained[0][name] for row in trained):
            raise ValueError(f"rows to draw together must have the same {name}")
    first = trained[0]
    # The location of the images does not matter here, and the steps are given separately.
    told = [override for override in first["overrides"] if not override.startswith(("data.", "trainer.steps="))]
    name = ", ".join([first["scene"], *told, f"{first['steps']} steps"])
    drawn = []
    for key, unit in (("train_seconds", "seconds"), ("psnr", "PSNR, dB"), ("peak_gib", "GiB")):
        panels = []
        for sweep in Size._fields:
            points = [(row[sweep], row[key]) for row in trained if sweep in row["sweeps"] and row[key] is not None]
            if not points:
                continue
            ticks = [(x, str(x) if sweep == "finest_resolution" else f"{x / 1024:g}Ki") for x, _ in points]
            series = _plot.Series(name, _plot.BLUE, False, points)
            label = "finest resolution" if sweep == "finest_resolution" else "samples per step"
            panels.append(_plot.Panel(f"{unit} against {label}", label, unit, ticks, [series], linear=key == "psnr"))
        if panels:
            drawn.append(panels)
    return _plot.figure(drawn)


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line; trains at every size and prints the table last, or prints and plots earlier runs."""
    parser = harness.parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the configuration, as train.py takes them")
    parser.add_argument("--scene", default="lego", help="as configs/scene has it (default: lego)")
    parser.add_argument("--data-root", type=Path, help="folder of scenes; default: data.root of the configuration")
    parser.add_argument("--hold-out", type=int, default=10, metavar="N", help="judge every N-th training view (10)")
    parser.add_argument("--finest-resolution", type=int, nargs="*", metavar="N", help="default: by the device")
    parser.add_argument("--samples", type=int, nargs="*", metavar="N", help="default: a quarter to four times the own")
    parser.add_argument("--plot", type=Path, nargs="+", metavar="JSON", help="draw these runs instead of training")
    parser.add_argument("--out", type=Path, help="SVG file to draw into")
    options = parser.parse_intermixed_args(arguments)
    if (options.plot is None) != (options.out is None):
        parser.error("--plot and --out go together")
    if options.hold_out < 2:
        parser.error(f"--hold-out must be at least 2, got {options.hold_out}")
    for name, numbers, least in (
        ("--finest-resolution", options.finest_resolution, 2),
        ("--samples", options.samples, 1),
    ):
        if any(number < least for number in numbers or ()):
            parser.error(f"{name} must be at least {least}, got {numbers}")
    if options.plot:
        read = [row for path in options.plot for row in json.loads(path.read_text())["rows"]]
        rows = list({size_of(row): row for row in read}.values())
        print(as_table(rows))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(draw(rows))
        return

    session = harness.start(options)
    kind = session.device.type
    # If kernels must be compiled, do it here, so that it does not count as training time.
    ensure_loaded(kind)
    if kind == "cuda":
        torch.cuda.empty_cache()  # this process's cache would not be available to the trainings' processes
    overrides = [f"scene={options.scene}", *options.overrides]
    settings = preset(*overrides, device=str(session.device))
    settings.device = str(session.device)  # overrides any other choice, because the figures are labelled with this one
    if options.data_root is not None:
        settings.data.root = str(options.data_root)
    own = own_size(settings)
    resolutions = options.finest_resolution
    if resolutions is None:
        resolutions = sorted({*FINEST_RESOLUTIONS[kind], own.finest_resolution})
    samples = options.samples if options.samples is not None else [int(own.samples * n) for n in SAMPLE_FACTORS]
    chosen = [size for size in sizes(own, resolutions, samples) if options.only in size.label]
    if options.quick:
        chosen = [size for size in chosen if all(a <= b for a, b in zip(size, own, strict=True))]
    rows = []
    for size in chosen:
        row = {
            **size._asdict(),
            "sweeps": size.sweeps(own),
            "scene": options.scene,
            "overrides": options.overrides,
            "steps": settings.trainer.steps,
            "hold_out": options.hold_out,
            **train_apart(resized(settings, size), options.hold_out),
        }
        rows.append(row)
        outcome = row.get("error") or f"{row['train_seconds']:.1f} s, {row['psnr']:.2f} dB"
        print(f"{size.label}: {outcome}", flush=True)
        if options.json:
            session.write(options.json, "training", __doc__, rows)

    session.announce()
    print("\n" + as_table(rows))


if __name__ == "__main__":
    main()
