"""The picture of a capture: cameras, box and points from three sides and at an angle, with the images below."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar
from torch import Tensor
from torch.nn import functional as F

from voxelfield.captures.capture import Capture
from voxelfield.captures.checks import Finding
from voxelfield.captures.figures import figures, nearest_distances, upright
from voxelfield.captures.page import BOX, MUTED, SPLITS, WARNING

WIDTH, HEIGHT = 1800, 1240
"""Pixels of the drawings above the images."""

SHOWN = 80
"""Most images below the drawings."""

_DPI = 100
_POINTS = 20_000
_AXES = {"x": "#d93025", "y": "#1e8e3e", "z": "#1a73e8"}
_CLUSTER = 0.4  # cameras within so much of everything are drawn once more by themselves
_ELEVATION, _AZIMUTH = math.radians(25.0), math.radians(35.0)
# Corners of a box, as bits of x, y and z; edges join those that differ in one bit.
_EDGES = [(one, one | bit) for one in range(8) for bit in (1, 2, 4) if not one & bit]

# Pixels around the images, between them, for a line of text, and at least for names below narrow images.
_MARGIN, _GAP, _LINE, _NARROWEST = 30, 10, 18, 120


def draw(capture: Capture, findings: Sequence[Finding]) -> bytes:
    """Draws a capture.

    Args:
        capture: What to draw.
        findings: What was found; named beside the drawings and marked on the images.

    Returns:
        A PNG file, 1800 pixels wide.
    """
    titles: dict[int, list[str]] = {}
    for finding in findings:
        # A finding about most views does not distinguish any of them.
        for index in finding.views if len(finding.views) <= len(capture) // 2 else ():
            titles.setdefault(index, []).append(finding.title)
    views = shown_views(len(capture), list(titles))
    widest = max(_NARROWEST, *(capture.thumbnails[index].width for index in views))
    columns = (WIDTH - 2 * _MARGIN + _GAP) // (widest + _GAP)
    tallest = max(capture.thumbnails[index].height for index in views)
    row = tallest + _LINE * (1 + max(len(titles.get(index, ())) for index in views)) + _GAP
    height = HEIGHT + 50 + -(-len(views) // columns) * row + _MARGIN
    figure = Figure(figsize=(WIDTH / _DPI, height / _DPI), dpi=_DPI)
    figure.text(0.02, 1 - 20 / height, f"{capture.name}: {len(capture)} views", fontsize=17, va="top", parse_math=False)
    grid = figure.add_gridspec(
        2, 3, left=0.045, right=0.985, top=1 - 0.07 * HEIGHT / height, bottom=1 - 0.98 * HEIGHT / height, hspace=0.14
    )
    everything = torch.cat((capture.origins, torch.cartesian_prod(*capture.aabb.T)))
    for column, (right, up, seen_from) in enumerate(((0, 1, "+z"), (0, 2, "-y"), (1, 2, "+x"))):
        axes = figure.add_subplot(grid[0, column], title=f"seen from {seen_from}", axisbelow=True)
        _draw_space(axes, capture, torch.eye(3, dtype=torch.float64)[[right, up]], everything)
        axes.set(xlabel=f"{'xyz'[right]} [world units]", ylabel=f"{'xyz'[up]} [world units]")
        axes.grid(color="#e8eaed")
    oblique, from_above = _views(capture)
    axes = figure.add_subplot(grid[1, 0], title="oblique view, up as in the images")
    _draw_view(axes, capture, oblique, everything)
    if _span(capture.origins) < _CLUSTER * _span(everything):
        axes = figure.add_subplot(grid[1, 1], title="cameras only, from the same angle")
        _draw_view(axes, capture, oblique, capture.origins)
    else:
        axes = figure.add_subplot(grid[1, 1], title="top view, up as in the images")
        _draw_view(axes, capture, from_above, everything)
    _draw_text(figure.add_subplot(grid[1, 2]), capture, findings)
    heading = "Images" if len(views) == len(capture) else f"{len(views)} of {len(capture)} images"
    figure.text(_MARGIN / WIDTH, 1 - (HEIGHT + 30) / height, heading, fontsize=14)
    for place, index in enumerate(views):
        x = _MARGIN + place % columns * ((WIDTH - 2 * _MARGIN + _GAP) // columns)
        y = height - HEIGHT - 50 - place // columns * row - tallest
        _draw_image(figure, capture, index, titles.get(index, []), x, y)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # Names may be in any script; a box stands for a letter that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.savefig(picture, format="png")
    return picture.getvalue()


def shown_views(count: int, flagged: Sequence[int], max_views: int = SHOWN) -> list[int]:
    """Chooses views to show: those that something was found about, and others spread evenly, in their order.

    Args:
        count: Number of views.
        flagged: Indices of those that something was found about.
        max_views: Number of views to choose; all if there are fewer.
    """
    if count <= max_views:
        return list(range(count))
    kept = sorted(set(flagged))[: max_views // 2]
    others = [index for index in range(count) if index not in set(kept)]
    room = max_views - len(kept)
    return sorted({*kept, *(others[index * len(others) // room] for index in range(room))})


def frustum_lines(c2w: Tensor, intrinsics: Tensor, sizes: Tensor, depth: float) -> Tensor:
    """Returns the edges of the pyramids between cameras and their images, with a mark above each image.

    Args:
        c2w: (N, 4, 4) camera to world, OpenGL axes.
        intrinsics: (N, 4) ``fx, fy, cx, cy`` in pixels.
        sizes: (N, 2) width and height in pixels.
        depth: Distance from a camera to its image plane, world units.

    Returns:
        (N, 10, 2, 3) ends of lines, world frame.
    """
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=c2w.dtype)
    # Wider ones are drawn with a field of view of 90 degrees; a focal length of zero would need infinite corners.
    focal = torch.maximum(intrinsics[:, None, :2], 0.5 * sizes[:, None])
    across = (corners * sizes[:, None] - intrinsics[:, None, 2:]) / focal
    image = torch.stack((across[..., 0], -across[..., 1], -torch.ones_like(across[..., 0])), dim=-1) * depth
    upper_left, upper_right = image[:, 0], image[:, 1]
    tip = (upper_left + upper_right) / 2 + 0.5 * (upper_left - image[:, 3])
    apex = torch.zeros_like(tip)
    ends = [(apex, image[:, index]) for index in range(4)]
    ends += [(image[:, index], image[:, (index + 1) % 4]) for index in range(4)]
    ends += [(upper_left, tip), (tip, upper_right)]
    lines = torch.stack([torch.stack(pair, dim=1) for pair in ends], dim=1)
    return lines @ c2w[:, None, :3, :3].mT + c2w[:, None, None, :3, 3]


def _draw_space(axes: Any, capture: Capture, basis: Tensor, shown: Tensor) -> float:
    """Draws points, box and frusta onto the plane of a basis (2, 3); returns the span of the positions (N, 3) shown."""
    if len(capture.points):
        chosen = torch.linspace(0, len(capture.points) - 1, min(_POINTS, len(capture.points))).long()
        colors = capture.colors[chosen].numpy() / 255
        axes.scatter(*(capture.points[chosen] @ basis.T).T, s=2.5, c=colors, linewidths=0, alpha=0.7, zorder=1)
    corners = torch.cartesian_prod(*capture.aabb.T) @ basis.T
    axes.add_collection(LineCollection(list(corners[torch.tensor(_EDGES)].numpy()), colors=BOX, zorder=2))
    shown = shown @ basis.T
    span = max(_span(shown), 1e-3 * _span(capture.aabb))
    # Frusta must be visible, and must not cover one another.
    spacing = 1.5 * float(nearest_distances(capture.origins).median()) if len(capture) > 1 else math.inf
    sizes = torch.tensor(capture.sizes, dtype=torch.float64)
    depth = min(max(spacing, 0.02 * span), 0.07 * span)
    lines = frustum_lines(capture.c2w, capture.intrinsics, sizes, depth) @ basis.T
    for number, split in enumerate(dict.fromkeys(capture.splits), start=3):
        ours = torch.tensor([name == split for name in capture.splits])
        color, width = SPLITS.get(split, MUTED), 1.0 if len(capture) <= 60 else 0.6
        edges = list(lines[ours].flatten(0, 1).numpy())
        axes.add_collection(LineCollection(edges, colors=color, linewidths=width, zorder=number))
        axes.scatter(*(capture.origins[ours] @ basis.T).T, s=5, color=color, linewidths=0, zorder=number)
    x, y = ((shown.amin(dim=0) + shown.amax(dim=0)) / 2).tolist()
    half = 0.63 * span
    axes.set(xlim=(x - half, x + half), ylim=(y - half, y + half), aspect="equal")
    return span


def _draw_view(axes: Any, capture: Capture, basis: Tensor, shown: Tensor) -> None:
    """Draws everything along a direction that is none of the world's axes, with a scale and the axes' directions."""
    length = _draw_space(axes, capture, basis, shown) / 4
    length = max(round_ for factor in (1, 2, 5) if (round_ := factor * 10 ** math.floor(math.log10(length))) <= length)
    axes.set(xticks=[], yticks=[])
    label = f"{length:g} {'unit' if length == 1 else 'units'}"
    axes.add_artist(AnchoredSizeBar(axes.transData, length, label, "lower right", frameon=False))
    foot = torch.tensor([0.11, 0.1])
    for (name, color), direction in zip(_AXES.items(), basis.T, strict=True):
        if float(direction.norm()) > 0.25:  # not towards the viewer
            tip = (foot + 0.1 * direction).tolist()
            arrow = {"arrowstyle": "<|-", "color": color, "shrinkA": 0, "shrinkB": 0}
            axes.annotate(name, foot.tolist(), tip, "axes fraction", color=color, arrowprops=arrow, ha="center")


def _draw_text(axes: Any, capture: Capture, findings: Sequence[Finding]) -> None:
    axes.set_axis_off()
    handles = [
        Line2D([], [], color=SPLITS.get(name, MUTED), label=f"{name} cameras") for name in dict.fromkeys(capture.splits)
    ]
    handles.append(Line2D([], [], color=BOX, label="box"))
    if len(capture.points):
        handles.append(Line2D([], [], color=MUTED, marker=".", linestyle="", label="sparse points"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.02, 1.02), frameon=False, ncols=2, fontsize=11)
    found = [f"{finding.title}: {finding.message}" for finding in findings]
    texts = [(f"{label}: {text}", BOX) for label, text in figures(capture)] + [("", BOX)]
    texts += [(text, WARNING) for text in found] or [("nothing unusual was found", BOX)]
    lines = [
        (line, color) for text, color in texts for line in textwrap.wrap(text, 62, subsequent_indent="    ") or [""]
    ]
    step = min(0.036, 0.86 / len(lines))
    for number, (line, color) in enumerate(lines):
        axes.text(0, 0.87 - number * step, line, color=color, fontsize=min(10, 280 * step), va="top", parse_math=False)


def _draw_image(figure: Figure, capture: Capture, index: int, titles: Sequence[str], x: int, y: int) -> None:
    """Draws an image with its lower left corner at a pixel, and below it its name and the titles of its findings."""
    image = capture.thumbnails[index]
    figure.figimage(np.asarray(image), x, y, origin="upper")
    color, width = (WARNING, 3) if titles else (MUTED, 1)
    frame = Rectangle((x, y), image.width, image.height, fill=False, color=color, linewidth=0.72 * width)
    figure.add_artist(frame).set_transform(None)
    texts = [(capture.names[index], SPLITS.get(capture.splits[index], MUTED)), *((title, WARNING) for title in titles)]
    for number, (text, color) in enumerate(texts):
        shown = text if len(text) <= 18 else f"{text[:9]}…{text[-8:]}"
        figure.text(x, y - 16 - number * _LINE, shown, color=color, fontsize=9.5, transform=None, parse_math=False)


def _span(points: Tensor) -> float:
    return float((points.amax(dim=0) - points.amin(dim=0)).max())


def _views(capture: Capture) -> tuple[Tensor, Tensor]:
    """Returns two views as their right and up directions (2, 3).

    The first is from behind the cameras, to one side and from above, the second from straight above.
    """
    up = upright(capture)
    if up is None:
        up = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    back = -capture.looks.mean(dim=0)
    back = back - (back @ up) * up
    if float(back.norm()) < 0.2:
        # Cameras all around: any side will do, as long as it is not along the up direction.
        axis = torch.eye(3, dtype=torch.float64)[int(up.abs().argmin())]
        back = axis - (axis @ up) * up
    back = F.normalize(back, dim=0)
    side = torch.linalg.cross(up, back)
    towards = math.cos(_AZIMUTH) * back + math.sin(_AZIMUTH) * side
    right = torch.linalg.cross(up, towards)
    oblique = torch.stack((right, math.cos(_ELEVATION) * up - math.sin(_ELEVATION) * towards))
    return oblique, torch.stack((side, -back))
