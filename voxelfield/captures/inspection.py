"""Inspection of a scene before training: its measures, probable problems, a picture and a page."""

from __future__ import annotations

import io
import logging
import logging.handlers
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from voxelfield.captures.capture import Capture, read_capture
from voxelfield.captures.checks import Finding, check_capture
from voxelfield.files import write_file
from voxelfield.media.html import page_template
from voxelfield.messages import one_line, printable
from voxelfield.rendering.pixels import jpeg_bytes

PICTURE, PAGE = "inspect.png", "inspect.html"
"""Names of the picture and of the page."""

_MAX_VIEWS = 200  # on the page, besides those with a finding
_AGREEMENT = 0.3  # length of the mean up direction below which it is not meaningful

SPLITS = {"train": "#1f6fb4", "val": "#2e8b57", "test": "#d9660a"}
"""Colours of the splits' cameras."""

_GREY, _BOX = "#9aa0a6", "#202124"
_AXES = {"x": "#d93025", "y": "#1e8e3e", "z": "#1a73e8"}
_POINTS = 20_000
_ELEVATION, _AZIMUTH = math.radians(25.0), math.radians(35.0)
# Corners of a box, as bits of x, y and z; edges join those that differ in one bit.
_EDGES = torch.tensor([(one, one | bit) for one in range(8) for bit in (1, 2, 4) if not one & bit])


def inspect_scene(
    folder: Path, out: Path, aabb: Sequence[Sequence[float]] | None = None, model: int | None = None
) -> tuple[list[tuple[str, str]], list[Finding]]:
    """Reads a scene (:func:`voxelfield.captures.capture.read_capture`), checks it, and writes its picture and page.

    These are :data:`PICTURE` and :data:`PAGE` in the folder ``out``, which is created if missing.

    Returns:
        The measures, as labels and texts, and the findings of the checks. The page also has the loader's warnings.

    Raises:
        Exception: As for :func:`voxelfield.datasets.loading.load_scene`.
        OSError: The picture or the page cannot be written.
    """
    loaders, warnings = logging.getLogger("voxelfield.datasets"), logging.handlers.BufferingHandler(1_000_000)
    warnings.setLevel(logging.WARNING)
    loaders.addHandler(warnings)
    try:
        capture = read_capture(folder, aabb, model)
    finally:
        loaders.removeHandler(warnings)
    rows, findings = [*measures(capture)], check_capture(capture)
    notes = [Finding("loading", one_line(printable(record.getMessage()))) for record in warnings.buffer]
    picture = draw(capture)
    write_file(out / PICTURE, picture)
    write_file(out / PAGE, make_page(capture, rows, [*notes, *findings], picture).encode())
    return rows, findings


def make_page(capture: Capture, rows: Sequence[tuple[str, str]], findings: Sequence[Finding], picture: bytes) -> str:
    """Returns an HTML page that needs no other file: warnings, measures, the picture (PNG) and the images."""
    titles: dict[int, list[str]] = {}
    for finding in findings:
        # A finding about most views does not distinguish any of them.
        for index in finding.views if len(finding.views) <= len(capture) // 2 else ():
            titles.setdefault(index, []).append(finding.title)
    spread = range(0, len(capture), -(-len(capture) // _MAX_VIEWS))
    views = [
        {
            "name": capture.names[index],
            "split": capture.splits[index],
            "titles": titles.get(index, []),
            "image": jpeg_bytes(capture.thumbnails[index]),
        }
        for index in sorted({*spread, *titles})
    ]
    template = page_template("voxelfield.captures", PAGE)
    return template.render(
        name=capture.name, count=len(capture), rows=rows, findings=findings, picture=picture, views=views
    )


def measures(capture: Capture) -> Iterator[tuple[str, str]]:
    """Yields the measures of a capture, as labels and texts of one line each."""
    splits = Counter(capture.splits)
    sizes = Counter(f"{width} x {height}" for width, height in capture.sizes)
    distances = (capture.origins - capture.aabb.mean(dim=0)).norm(dim=-1)
    low, high = capture.aabb
    yield "format", capture.format
    yield "views", f"{len(capture)}: {', '.join(f'{count} {name}' for name, count in splits.items())}"
    yield "image size", f"{_counted(sizes)} pixels"
    yield "cameras", _counted(Counter(["pinhole"] * len(capture) if capture.lens is None else capture.lens.models))
    yield "focal length, x", f"{_range(capture.intrinsics[:, 0])} pixels"
    yield "focal length, y", f"{_range(capture.intrinsics[:, 1])} pixels"
    yield "field of view, horizontal", f"{_range(capture.fields_of_view[:, 0])} degrees"
    yield "field of view, vertical", f"{_range(capture.fields_of_view[:, 1])} degrees"
    yield "box", f"{_vector(low)} to {_vector(high)}"
    yield "size of the box", f"{_vector(high - low)} units"
    if capture.motion is not None:
        turn, move = capture.motion.unbind(dim=-1)
        some = int(capture.motion.any(dim=-1).sum())
        motion = f"turn by {_range(turn.rad2deg())} degrees and move by {_range(move)} units"
        yield "rolling shutter", f"{some} of {len(capture)} images, during which cameras {motion}"
    if capture.warp is not None:
        yield capture.warp.summary
    spread = capture.origins.amax(dim=0) - capture.origins.amin(dim=0)
    yield "extent of the cameras", f"{_vector(spread)} units"
    yield "distance to the box's centre", f"{_range(distances)} units"
    if len(capture) > 1:
        yield "distance to the nearest camera", f"{_range(nearest_distances(capture.origins))} units"
    up, agreement = capture.up, float(capture.up.norm())
    if agreement < _AGREEMENT:
        yield "up direction", "none: the images differ too much"
    else:
        tilt = float((up[2] / agreement).clamp(-1, 1).acos().rad2deg())
        direction = f"{_vector(up / agreement)}, {tilt:.1f} degrees from z"
        yield "up direction, mean of the images", direction
    if len(capture.points):
        inside = ((capture.points >= low) & (capture.points <= high)).all(dim=-1).double().mean()
        name = "points between the stated depths" if capture.format == "LLFF" else "sparse points"
        yield name, f"{len(capture.points)}, of which {100 * float(inside):.0f} % in the box"
    if capture.masked:
        yield "masks", _share(capture.masked, " pixels are left out")
    if capture.times is not None:
        yield "times", f"{_range(capture.times)}, {len(capture.times.unique())} different"
    if any(capture.transparency):
        yield "transparent pixels", _share(capture.transparency)
    yield "coordinates", "right-handed world as in the files; cameras look along -z, y up"


def _share(shares: Sequence[float], of_what: str = "") -> str:
    percent, some = 100 * sum(shares) / len(shares), sum(share > 0 for share in shares)
    return f"{percent:.2g} % of all{of_what}, in {some} of {len(shares)} images"


def _range(values: Tensor) -> str:
    low, middle, high = (float(value) for value in (values.min(), values.median(), values.max()))
    if high - low <= 1e-3 * abs(high):
        return f"{middle:.4g}"
    return f"{low:.4g} to {high:.4g}, median {middle:.4g}"


def _vector(values: Tensor) -> str:
    # Show rounding residue as 0.
    shown = torch.where(values.abs() > 1e-6 * values.abs().max(), values, 0.0)
    return f"({', '.join(f'{value:.3g}' for value in shown.tolist())})"


def _counted(counts: Counter[str]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{name} ({count} images)" for name, count in counts.most_common())


def draw(capture: Capture) -> bytes:
    """Draws a capture from six sides; returns a PNG file."""
    figure = Figure(figsize=(18, 12), dpi=100, layout="constrained")
    everything = torch.cat((capture.origins, torch.cartesian_prod(*capture.aabb.T)))
    panels = figure.subplots(2, 3)
    for axes, (right, up, seen_from) in zip(panels[0], ((0, 1, "+z"), (0, 2, "-y"), (1, 2, "+x")), strict=True):
        _draw_space(axes, capture, torch.eye(3, dtype=torch.float64)[[right, up]], everything)
        axes.set(title=f"seen from {seen_from}", axisbelow=True)
        axes.set(xlabel=f"{'xyz'[right]} [world units]", ylabel=f"{'xyz'[up]} [world units]")
        axes.grid(color="#e8eaed")
    oblique, top = _views(capture.up)
    for axes, title, basis, shown in (
        (panels[1, 0], "oblique view, up as in the images", oblique, everything),
        (panels[1, 1], "the same, of the cameras only", oblique, capture.origins),
        (panels[1, 2], "top view, up as in the images", top, everything),
    ):
        _draw_space(axes, capture, basis, shown)
        axes.set(title=title, xticks=[], yticks=[])
        for name, direction in zip("xyz", basis.T, strict=True):
            tip = (torch.tensor([0.11, 0.1]) + 0.1 * direction).tolist()
            arrow = {"arrowstyle": "<|-", "color": _AXES[name], "shrinkA": 0, "shrinkB": 0}
            axes.annotate(name, (0.11, 0.1), tip, "axes fraction", color=_AXES[name], arrowprops=arrow, ha="center")
    panels[1, 2].legend(loc="upper right")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def frustum_lines(c2w: Tensor, intrinsics: Tensor, sizes: Tensor, depth: float) -> Tensor:
    """Returns the edges of the pyramids between cameras and their images, with a mark above each image.

    They are ends of lines (N, 10, 2, 3), world frame, given poses (N, 4, 4) with OpenGL axes, intrinsics (N, 4) and
    sizes (N, 2) in pixels, and the distance from a camera to its image plane, world units.
    """
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=c2w.dtype)
    # Wider ones are drawn with a field of view of 90 degrees; a focal length of zero would need infinite corners.
    focal = torch.maximum(intrinsics[:, None, :2], 0.5 * sizes[:, None])
    across = (corners * sizes[:, None] - intrinsics[:, None, 2:]) / focal
    image = torch.stack((across[..., 0], -across[..., 1], -torch.ones_like(across[..., 0])), dim=-1) * depth
    tip = (image[:, 0] + image[:, 1]) / 2 + 0.5 * (image[:, 0] - image[:, 3])
    points = torch.cat((image, torch.zeros_like(tip)[:, None], tip[:, None]), dim=1)
    lines = points[:, [[4, 0], [4, 1], [4, 2], [4, 3], [0, 1], [1, 2], [2, 3], [3, 0], [0, 5], [5, 1]]]
    return lines @ c2w[:, None, :3, :3].mT + c2w[:, None, None, :3, 3]


def nearest_distances(origins: Tensor) -> Tensor:
    """Returns the distance (N,) from each of the positions (N, 3), N at least 2, to the nearest other."""
    return torch.cdist(origins, origins).fill_diagonal_(torch.inf).amin(dim=-1)


def _draw_space(axes: Any, capture: Capture, basis: Tensor, shown: Tensor) -> None:
    """Draws points, box and frusta onto the plane of a basis (2, 3), as far as the positions (N, 3) ``shown`` reach."""
    if len(capture.points):
        chosen = torch.linspace(0, len(capture.points) - 1, min(_POINTS, len(capture.points))).long()
        points = capture.points[chosen] @ basis.T
        axes.scatter(*points.T, s=2.5, color=_GREY, linewidths=0, alpha=0.7, zorder=1, label="points")
    corners = torch.cartesian_prod(*capture.aabb.T) @ basis.T
    axes.add_collection(LineCollection(list(corners[_EDGES].numpy()), colors=_BOX, zorder=2, label="box"))
    shown = shown @ basis.T
    span = max(_span(shown), 1e-3 * _span(capture.aabb))
    # Frusta must be visible, and must not cover one another.
    spacing = 1.5 * float(nearest_distances(capture.origins).median()) if len(capture) > 1 else math.inf
    sizes = torch.tensor(capture.sizes, dtype=torch.float64)
    depth = min(max(spacing, 0.02 * span), 0.07 * span)
    lines = frustum_lines(capture.c2w, capture.intrinsics, sizes, depth) @ basis.T
    for number, split in enumerate(dict.fromkeys(capture.splits), start=3):
        chosen = torch.tensor([name == split for name in capture.splits])
        style: dict[str, Any] = {"color": SPLITS.get(split, _GREY), "zorder": number}
        width = 1.0 if len(capture) <= 60 else 0.6
        axes.add_collection(LineCollection(list(lines[chosen].flatten(0, 1).numpy()), linewidths=width, **style))
        axes.scatter(*(capture.origins[chosen] @ basis.T).T, s=5, linewidths=0, label=f"{split} cameras", **style)
    x, y = ((shown.amin(dim=0) + shown.amax(dim=0)) / 2).tolist()
    axes.set(xlim=(x - 0.63 * span, x + 0.63 * span), ylim=(y - 0.63 * span, y + 0.63 * span), aspect="equal")


def _span(points: Tensor) -> float:
    return float((points.amax(dim=0) - points.amin(dim=0)).max())


def _views(up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an oblique view and one from above, as their right and up directions (2, 3)."""
    up = F.normalize(up, dim=0)
    side = F.normalize(torch.linalg.cross(up, torch.eye(3, dtype=up.dtype)[int(up.abs().argmin())]), dim=0)
    back = torch.linalg.cross(side, up)
    towards = math.cos(_AZIMUTH) * back + math.sin(_AZIMUTH) * side
    right = torch.linalg.cross(up, towards)
    return torch.stack((right, math.cos(_ELEVATION) * up - math.sin(_ELEVATION) * towards)), torch.stack((side, -back))
