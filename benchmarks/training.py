"""Trains a scene over sizes: seconds, quality and memory against the finest resolution and samples per step.

    python benchmarks/training.py [OVERRIDE ...] [--scene NAME] [--data-root DIR] [--hold-out N]
                                  [--finest-resolution [N ...]] [--samples [N ...]] [--device cpu|cuda] [--threads N]
                                  [--quick] [--only SUBSTRING] [--json PATH]
    python benchmarks/training.py --plot PATH.json [PATH.json ...] --out PATH.svg

The configuration is what ``python train.py scene=NAME OVERRIDE ...`` would compose on the device. About the preset's
own finest resolution and samples per step one of the two varies at a time; ``--finest-resolution`` and ``--samples``
say over what, and with no number leave that sweep out.

- Levels are those of ``model.resolutions`` but its last that are coarser than the finest, and the finest; those that
  are added up keep their ratios to it instead; a model without levels has its last resolution there.
  ``trainer.stages`` follow: those up to the finest, the last at it.
- ``trainer.max_rays`` and ``trainer.candidate_samples`` grow and shrink with ``trainer.visible_samples``. "rays" are
  those of a step that had room, in the mean since the last record: finer levels have more samples along a ray, so fewer
  of them.
- Every N-th training view (``--hold-out``) is not trained on; PSNR and SSIM are over these views, drawn as the trainer
  would draw its evaluation. The test split is never read.
- Seconds are metrics.json's ``train_seconds``: from images in memory to the last step, upload, building the field and
  capturing graphs included. GiB is the most that torch held on the device meanwhile.
- Each training has a process of its own, and writes no checkpoint. Where one fails, which it does before it starts if
  the device's memory cannot hold it, the error is its row and the sweep goes on.
- The preset itself comes first, then what is ever further from it; the JSON file is written after each training.
- ``--quick`` leaves out what is larger than the preset. ``--plot`` prints and draws the rows of all its files; those of
  a later one replace those of an earlier one.
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
from voxelfield.datasets.scene import Scene, Split
from voxelfield.training.config import RunConfig, preset
from voxelfield.training.configured import load_configured_scene
from voxelfield.training.logging import NullLogger
from voxelfield.training.session import Session

FINEST_RESOLUTIONS = {"cuda": (128, 192, 512, 768, 1024), "cpu": (32, 64, 96)}
SAMPLE_FACTORS = (0.25, 0.5, 1, 2, 4)
# What two rows must share to be one curve.
SETTING = ("scene", "overrides", "steps", "hold_out")


class Size(NamedTuple):
    """What varies between trainings."""

    finest_resolution: int
    samples: int

    @property
    def label(self) -> str:
        """Returns the size as it is printed."""
        return f"finest resolution {self.finest_resolution}, samples {self.samples}"

    def sweeps(self, own: Size) -> list[str]:
        """Returns the sweeps about the preset's own size that this one is part of."""
        part_of = {
            "finest_resolution": self.samples == own.samples,
            "samples": self.finest_resolution == own.finest_resolution,
        }
        return [sweep for sweep, member in part_of.items() if member]

    def distance(self, own: Size) -> float:
        """Returns by how many powers of two it is off the preset's own size."""
        return sum(abs(math.log2(mine / theirs)) for mine, theirs in zip(self, own, strict=True))


def own_size(settings: RunConfig) -> Size:
    """Returns the size that settings have by themselves."""
    return Size(max(settings.trainer.resolutions), settings.trainer.visible_samples)


def sizes(own: Size, resolutions: Sequence[int], samples: Sequence[int]) -> list[Size]:
    """Returns the trainings of both sweeps, without repetition, the nearest to the preset's own first."""
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
    """Keeps the last of each scalar."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.last.update(values)


def divide(split: Split, every: int) -> tuple[Split, Split]:
    """Returns the views to train on, and every so many-th, from the first on, to judge."""

    def chosen(views: list[int]) -> Split:
        masks = None if split.masks is None else split.masks[views]
        return Split(split.images[views], split.cameras[views], tuple(split.names[view] for view in views), masks)

    views = range(len(split))
    return chosen([view for view in views if view % every]), chosen(list(views[::every]))


def train(settings: RunConfig, hold_out: int) -> dict[str, Any]:
    """Trains and judges in this process; returns the figures of a row.

    Args:
        settings: Of the run; ``data.root`` is relative to the working directory.
        hold_out: Every so many-th training view is judged.

    Raises:
        ValueError: Memory does not suffice, which is told before the device's is touched.
        RuntimeError: Training failed.
    """
    scene = load_configured_scene(settings, Path.cwd(), splits=("train",))
    learned, held_out = divide(scene.train, hold_out)
    divided = Scene(scene.name, scene.aabb, {"train": learned, "held out": held_out})
    records = _Records()
    # No output folder: the largest checkpoints would fill disks, and nobody resumes them.
    session = Session.from_config(divided, settings, logger=records)
    device = session.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if not session.fit():
        raise RuntimeError(f"interrupted after step {session.step}")
    # Taken before views are drawn, which is no part of training.
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
    """Trains in a process of its own: no memory, cache or broken context is left to the next.

    Returns:
        What :func:`train` does, or its error's first line as ``error``.
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
    """Formats a line for each training, by size, and the errors below."""
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
    """Draws seconds, PSNR and GiB, one above the other, against the finest resolution and against samples per step.

    Raises:
        ValueError: No training came to its end, or the rows are not of one setting.
    """
    trained = sorted((row for row in rows if "error" not in row), key=size_of)
    if not trained:
        raise ValueError("there is no training to draw")
    for name in SETTING:
        if any(row[name] != trained[0][name] for row in trained):
            raise ValueError(f"rows to draw together must have the same {name}")
    first = trained[0]
    # Where the images came from is no setting, and the steps are told anyway.
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
    """Parses the command line; either trains at every size and prints the table last, or prints and draws such runs."""
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
    # Built here if at all: no training's seconds are a compiler's.
    ensure_loaded(kind)
    if kind == "cuda":
        torch.cuda.empty_cache()  # which the trainings' processes could not have
    overrides = [f"scene={options.scene}", *options.overrides]
    settings = preset(*overrides, device=str(session.device))
    settings.device = str(session.device)  # whatever an override says: the figures are labelled with this device
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
