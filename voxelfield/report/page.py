"""The page of a report: prepares the values and the charts for its template, and writes it."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from voxelfield.captures.checks import listed
from voxelfield.files import atomic_write
from voxelfield.media.html import page_template
from voxelfield.rendering.view_pictures import ERROR_MAXIMUM
from voxelfield.report.advice import advise
from voxelfield.report.record import Curve, RunRecord
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.run_directory import REPORT
from voxelfield.settings import RunConfig

OPEN_VIEWS = 12
"""Number of worst views shown initially; the others can be unfolded."""

# Legible on white and on black, because the page follows the reader's light or dark mode.
COLORS = ("#2f7fd6", "#e0602a", "#1f9d70", "#a550c0", "#b08510", "#d0416f", "#3a97a6", "#808894")
"""Colours of the curves of a chart, in their order, which limit their number."""

_GREY = "#8a919a"
_SIZE = (400, 230)  # points

_MEASURES = {
    "psnr": ("PSNR", "{:.2f}", "dB"),
    "ssim": ("SSIM", "{:.4f}", ""),
    "lpips": ("LPIPS", "{:.4f}", ""),
    "psnr_fitted": ("PSNR, fitted exposure", "{:.2f}", "dB"),
    "ssim_fitted": ("SSIM, fitted exposure", "{:.4f}", ""),
}
_PARTS = {
    "load": "reading images",
    "train": "training, with previews and checkpoints",
    "evaluate": "evaluating views",
    "write": "writing model and video",
}
_MEMORY = {
    "parameters": "grids",
    "gradients": "their gradients",
    "optimizer": "Adam's moments",
    "copies": "16-bit copies",
    "average": "averaged weights",
    "images": "training images",
    "samples": "samples of one step",
}
_PEAKS = {"peak_gpu_gib": "peak GPU memory of training", "peak_host_gib": "peak host memory of the process"}


def write_report(
    directory: Path, metrics: Mapping[str, Any], config: RunConfig, thumbnails: Thumbnails, path: Path | None = None
) -> Path:
    """Writes the report of a run, whole or not at all; returns the file, by default ``report.html`` in its directory.

    The directory's records and log are read; ``metrics`` is the content of its ``metrics.json``.
    """
    path = directory / REPORT if path is None else path
    page = make_page(RunRecord.read(directory, metrics, config, thumbnails.pictures()))
    with atomic_write(path) as file:
        file.write(page.encode("utf-8", errors="replace"))
    return path


def make_page(record: RunRecord) -> str:
    """Returns the HTML of a report; it needs no other file, runs one script of its own and asks no network.

    The record's texts may be anything: all of them are escaped.
    """
    metrics = record.metrics
    estimated = _breakdown(metrics.get("estimated_gib", {}), _MEMORY, amount_of_memory)
    peaks = [(label, amount_of_memory(metrics[key])) for key, label in _PEAKS.items() if key in metrics]
    script = page_template("voxelfield.report", "script.js").render()
    views = _views(record)
    shown = [view for view in views if view["pictures"]]
    return page_template("voxelfield.report", "report.html").render(
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        video=record.video,
        extremes=[("Best", shown[-1]), ("Worst", shown[0])] if len(shown) > 1 else [("Only", view) for view in shown],
        scene=metrics["scene"],
        finished=record.finished,
        split=metrics.get("split", "test"),
        figures=_headline(metrics),
        findings=advise(record),
        logged=record.logged,
        charts=_curves(record),
        colors=COLORS,
        views=views,
        open_views=OPEN_VIEWS,
        error_maximum=ERROR_MAXIMUM,
        resources=[
            ("Wall-clock time", _breakdown(metrics.get("seconds", {}), _PARTS, duration)),
            ("Estimated device memory for training", estimated),
            ("Measured memory", peaks),
        ],
        facts=_facts(record),
        commands=record.commands,
        config=yaml.safe_dump(asdict(record.config), sort_keys=False, allow_unicode=True),
    )


def _scores(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields label, value and unit of the quality measures in ``values``."""
    for name, (label, form, unit) in _MEASURES.items():
        if name in values:
            yield label, form.format(values[name]), unit


def _headline(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields label, value and unit of the figures that a reader looks for first."""
    yield from _scores(metrics)
    yield "training time", duration(metrics["train_seconds"]), ""
    yield "steps", f"{metrics['steps']:,}", ""
    yield f"{metrics.get('split', 'test')} views evaluated", f"{metrics['views']:,}", ""
    if "peak_gpu_gib" in metrics:
        yield "peak GPU memory", f"{metrics['peak_gpu_gib']:.1f}", "GiB"


def _curves(record: RunRecord) -> list[Chart]:
    """Returns the charts of the recorded curves, the most telling ones first."""

    def family(prefix: str) -> dict[str, Curve]:
        found = {tag.removeprefix(prefix): curve for tag, curve in record.history.items() if tag.startswith(prefix)}
        return dict(sorted(found.items(), key=lambda item: -item[1][-1][1]))

    test = f"mean of the test views {listed(record.previewed, 4)}" if record.previewed else "previewed test views"
    psnr = {"pixels of training views": record.curve("train/psnr"), test: record.curve("test/psnr")}
    occupied = tuple((step, 100 * value) for step, value in record.curve("train/occupancy"))
    memory = {"allocated": record.curve("gpu/allocated_GiB"), "peak": record.curve("gpu/peak_GiB")}
    rays, samples = record.curve("train/rays_per_second"), record.curve("train/samples_per_ray")
    wanted = (
        line_chart("PSNR", "dB", psnr),
        line_chart("Loss terms, weighted", "", family("loss/"), logarithmic=True),
        line_chart("Rays per second", "", {"rays per second": rays}, from_zero=True),
        line_chart("Learning rates", "", family("lr/"), logarithmic=True),
        line_chart("Samples per ray", "", {"samples per ray": samples}, from_zero=True),
        line_chart("Occupied cells", "%", {"occupied": occupied}, from_zero=True),
        line_chart("GPU memory", "GiB", memory, from_zero=True),
    )
    return [chart for chart in wanted if chart is not None]


@dataclass(frozen=True)
class Chart:
    """A chart: an SVG file, the unit of its values, and a summary in words for screen readers.

    The legend has the name and the last value of each curve, in words, in the order of :data:`COLORS`.
    """

    title: str
    unit: str
    svg: bytes
    legend: tuple[tuple[str, str], ...]
    summary: str


def line_chart(
    title: str, unit: str, curves: Mapping[str, Curve], *, logarithmic: bool = False, from_zero: bool = False
) -> Chart | None:
    """Draws curves over steps, as many as there are :data:`COLORS`; returns None if there is nothing to draw.

    A logarithmic axis leaves out values that are not positive. ``from_zero`` suits amounts.
    """
    drawable: dict[str, Curve] = {}
    for name, curve in curves.items():
        points = tuple(
            (step, value) for step, value in curve if math.isfinite(value) and (value > 0 or not logarithmic)
        )
        if points and len(drawable) < len(COLORS):
            drawable[name] = points
    if not drawable:
        return None
    # Imported here, because it takes long and few programs write reports.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    settings: Any = {"axes.autolimit_mode": "round_numbers", "axes.xmargin": 0, "axes.ymargin": 0}
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY)
    settings |= {"font.size": 11.5, "svg.fonttype": "none", "svg.hashsalt": title}
    file, last_step = io.BytesIO(), max(curve[-1][0] for curve in drawable.values())
    with rc_context(settings):
        figure = Figure(figsize=(_SIZE[0] / 72, _SIZE[1] / 72))
        axes = figure.add_axes((0.13, 0.17, 0.84, 0.77), axisbelow=True)
        axes.set_yscale("log" if logarithmic else "linear")
        for color, curve in zip(COLORS, drawable.values(), strict=False):
            marker = "o" if len(curve) == 1 else ""  # a line through one point would not be visible
            axes.plot(*zip(*curve, strict=True), color=color, linewidth=2, marker=marker, clip_on=False)
        axes.set(xlim=(0, max(last_step, 1)), ylim=(0 if from_zero else None, None))
        axes.set_xlabel("steps", loc="right")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))
            axis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="both", length=0, pad=6)
        axes.grid(axis="y", color=_GREY, alpha=0.25)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(_GREY)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    legend = tuple((name, f"{short(curve[-1][1])} {unit}".strip()) for name, curve in drawable.items())
    summary = f"{title} over {last_step} steps: {'; '.join(f'{name} ends at {last}' for name, last in legend)}."
    return Chart(title, unit, file.getvalue(), legend, summary)


def short(value: float) -> str:
    """Writes 3120000 as 3.12M and 0.00002 as 2e-05."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return "0" if abs(value) < 1e-12 else f"{value:.3g}"


def _views(record: RunRecord) -> list[dict[str, Any]]:
    """Returns the evaluated views with their pictures, the worst first."""
    rows = sorted(record.metrics["per_view"], key=lambda row: row["psnr"])
    return [
        {
            "name": row["name"],
            "scores": ", ".join(" ".join(filter(None, score)) for score in _scores(row)),
            "pictures": record.pictures.get(row["name"]),
        }
        for row in rows
    ]


def _breakdown(
    amounts: Mapping[str, float], labels: Mapping[str, str], write: Callable[[float], str]
) -> list[tuple[str, str, str]]:
    """Returns label, amount and percentage of the parts of a sum."""
    parts = {name: value for name, value in amounts.items() if value > 0}
    total = sum(parts.values())
    return [(labels.get(name, name), write(value), f"{100 * value / total:.0f} %") for name, value in parts.items()]


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Returns labels and texts that describe the run and the machine."""
    metrics, config = record.metrics, record.config
    rows = [
        ("scene", str(metrics["scene"])),
        ("model", config.model.kind),
        ("grid", " x ".join(map(str, metrics["resolution"]))),
        ("training images", str(metrics["train_views"]) if "train_views" in metrics else ""),
        ("image size", " x ".join(map(str, metrics.get("image_size", ())))),
        ("seed", str(config.seed)),
        ("device", str(metrics["device"])),
        ("views rendered by", str(metrics.get("drawn_by", ""))),
    ]
    rows += [(name, str(value)) for name, value in metrics.get("environment", {}).items()]
    return [(label, text) for label, text in rows if text]


def duration(seconds: float) -> str:
    """Formats a duration, such as ``2 min 5 s``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def amount_of_memory(gib: float) -> str:
    """Formats an amount in GiB, or in MiB below one GiB."""
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"
