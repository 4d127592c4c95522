"""The page of a report: prepares the values that its template shows."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from voxelfield.rendering.view_pictures import ERROR_MAXIMUM
from voxelfield.report import charts
from voxelfield.report.advice import advise
from voxelfield.report.charts import Chart
from voxelfield.report.history import Curve
from voxelfield.report.record import RunRecord
from voxelfield.report.thumbnails import ViewPictures

OPEN_VIEWS = 12
"""Number of worst views shown initially; the others can be unfolded."""

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


@dataclass(frozen=True)
class Figure:
    """A headline figure."""

    label: str
    value: str
    unit: str = ""


@dataclass(frozen=True)
class Share:
    """A part of a whole, with its share in percent."""

    label: str
    amount: str
    percent: float


@dataclass(frozen=True)
class JudgedView:
    """A view in the gallery."""

    rank: int
    name: str
    scores: str
    pictures: ViewPictures | None


def make_page(record: RunRecord) -> str:
    """Returns the HTML of a report; it needs no other file, runs no script and asks the network for nothing.

    Args:
        record: The run. Its texts may be anything: all of them are escaped.
    """
    # Imported here, because it takes long and few programs write reports.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("voxelfield.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["data_uri"] = _data_uri
    metrics = record.metrics
    views = judged_views(record)
    return environment.get_template("report.html").render(
        scene=metrics["scene"],
        finished=record.finished,
        split=metrics.get("split", "test"),
        figures=headline(record),
        findings=advise(record),
        logged=record.logged,
        charts=curves(record),
        most_series=charts.MOST_SERIES,
        histogram=charts.histogram("PSNR of the views", "dB", [row["psnr"] for row in metrics["per_view"]]),
        views=views[:OPEN_VIEWS],
        more_views=views[OPEN_VIEWS:],
        error_maximum=ERROR_MAXIMUM,
        seconds=shares(metrics.get("seconds", {}), _PARTS, duration),
        memory=shares(metrics.get("estimated_gib", {}), _MEMORY, amount_of_memory),
        peaks=peaks(metrics),
        facts=facts(record),
        commands=record.commands,
        config=yaml.safe_dump(asdict(record.config), sort_keys=False, allow_unicode=True),
    )


def headline(record: RunRecord) -> list[Figure]:
    """Returns the figures that a reader looks for first."""
    metrics = record.metrics
    figures = [
        Figure(label, form.format(metrics[name]), unit)
        for name, (label, form, unit) in _MEASURES.items()
        if name in metrics
    ]
    figures.append(Figure("training time", duration(metrics["train_seconds"])))
    figures.append(Figure("steps", f"{metrics['steps']:,}"))
    figures.append(Figure(f"{metrics.get('split', 'test')} views evaluated", f"{metrics['views']:,}"))
    if "peak_gpu_gib" in metrics:
        figures.append(Figure("peak GPU memory", f"{metrics['peak_gpu_gib']:.1f}", "GiB"))
    return figures


def curves(record: RunRecord) -> list[Chart]:
    """Returns the charts of what was recorded, those first that tell whether a run is well."""

    def family(prefix: str) -> dict[str, Curve]:
        found = {tag.removeprefix(prefix): curve for tag, curve in record.history.items() if tag.startswith(prefix)}
        return dict(sorted(found.items(), key=lambda item: -item[1][-1][1]))

    psnr = {"training pixels": record.curve("train/psnr"), "previewed test views": record.curve("test/psnr")}
    occupied = tuple((step, 100 * value) for step, value in record.curve("train/occupancy"))
    memory = {"allocated": record.curve("gpu/allocated_GiB"), "peak": record.curve("gpu/peak_GiB")}
    wanted = (
        charts.line_chart("PSNR", "dB", psnr),
        charts.line_chart("Loss terms, weighted", "", family("loss/"), logarithmic=True),
        charts.line_chart(
            "Rays per second", "", {"rays per second": record.curve("train/rays_per_second")}, from_zero=True
        ),
        charts.line_chart("Learning rates", "", family("lr/"), logarithmic=True),
        charts.line_chart(
            "Samples per ray", "", {"samples per ray": record.curve("train/samples_per_ray")}, from_zero=True
        ),
        charts.line_chart("Occupied cells", "%", {"occupied": occupied}, from_zero=True),
        charts.line_chart("GPU memory", "GiB", memory, from_zero=True),
    )
    return [chart for chart in wanted if chart is not None]


def judged_views(record: RunRecord) -> list[JudgedView]:
    """Returns the evaluated views with their pictures, the worst first."""
    rows = sorted(record.metrics["per_view"], key=lambda row: row["psnr"])
    return [
        JudgedView(
            rank + 1,
            row["name"],
            ", ".join(
                f"{label} {form.format(row[name])} {unit}".strip()
                for name, (label, form, unit) in _MEASURES.items()
                if name in row
            ),
            record.pictures.get(row["name"]),
        )
        for rank, row in enumerate(rows)
    ]


def shares(amounts: Mapping[str, float], labels: Mapping[str, str], write: Callable[[float], str]) -> list[Share]:
    """Returns parts with their shares of the sum; none of nothing.

    Args:
        amounts: Parts by name.
        labels: What parts are called.
        write: Writes an amount.
    """
    there = {name: value for name, value in amounts.items() if value > 0}
    total = sum(there.values())
    return [Share(labels.get(name, name), write(value), 100 * value / total) for name, value in there.items()]


def peaks(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what was measured of memory."""
    measured = {
        "peak_gpu_gib": "peak GPU memory allocated by torch",
        "peak_host_gib": "peak host memory of the process",
    }
    return [(label, amount_of_memory(metrics[key])) for key, label in measured.items() if key in metrics]


def facts(record: RunRecord) -> list[tuple[str, str]]:
    """Returns what was run, and where, as labels and texts."""
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
    """Writes seconds as a reader would say them."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def amount_of_memory(gib: float) -> str:
    """Writes GiB, or MiB where there is less than one."""
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"


def _data_uri(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
