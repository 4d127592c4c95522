"""The picture of a capture: cameras, box and points from three sides and at an angle, with an image sheet below."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from voxelfield.captures.capture import Capture
from voxelfield.captures.checks import Finding
from voxelfield.captures.figures import figures, nearest_distances, upright
from voxelfield.captures.palette import BOX, MUTED, WARNING, split_color
from voxelfield.captures.sheet import draw_sheet

WIDTH, HEIGHT = 1800, 1240
"""Pixels of the drawings above the sheet."""

_DPI = 100
_POINTS = 20_000
_AXES = "xyz"
_AXIS_COLORS = ("#d93025", "#1e8e3e", "#1a73e8")
_CLUSTER = 0.4  # cameras within so much of everything are drawn once more by themselves
_ELEVATION, _AZIMUTH = math.radians(25.0), math.radians(35.0)
# Corners of a box, as bits of x, y and z; edges join those that differ in one bit.
_EDGES = [(one, one | bit) for one in range(8) for bit in (1, 2, 4) if not one & bit]


def draw(capture: Capture, findings: Sequence[Finding]) -> Image.Image:
    """Draws a capture.

    Args:
        capture: What to draw.
        findings: What was found; named beside the drawings and marked on the sheet.

    Returns:
        An RGB image, 1800 pixels wide.
    """
    figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(f"{capture.name}: {len(capture)} views", fontsize=17, x=0.02, y=0.985, ha="left")
    grid = figure.add_gridspec(2, 3, left=0.045, right=0.985, top=0.93, bottom=0.02, wspace=0.16, hspace=0.13)
    everything = torch.cat((capture.origins, capture.aabb))
    centre, span = _centre_and_span(everything)
    # Frusta must be visible, and must not cover one another.
    depth = min(max(_spacing(capture), 0.02 * span), 0.07 * span)
    for column, (right, up, seen_from) in enumerate(((0, 1, "+z"), (0, 2, "-y"), (1, 2, "+x"))):
        axes = figure.add_subplot(grid[0, column])
        basis = torch.eye(3, dtype=torch.float64)[[right, up]]
        _draw_space(axes, capture, basis, depth)
        axes.set_xlabel(f"{_AXES[right]} [world units]")
        axes.set_ylabel(f"{_AXES[up]} [world units]", labelpad=1)
        axes.set_title(f"seen from {seen_from}", fontsize=12)
        axes.grid(color="#e8eaed", linewidth=0.8)
        axes.set_axisbelow(True)
        _frame(axes, basis @ centre, span)
    oblique, from_above = _views(capture)
    _draw_view(figure.add_subplot(grid[1, 0]), capture, oblique, depth, "oblique view, up as in the images")
    axes = figure.add_subplot(grid[1, 1])
    spread = _centre_and_span(capture.origins)[1]
    if spread < _CLUSTER * span:
        near = max(spread, 1e-3 * span)
        depth = min(max(_spacing(capture), 0.04 * near), 0.12 * near)
        _draw_view(axes, capture, oblique, depth, "cameras only, from the same angle", near)
    else:
        _draw_view(axes, capture, from_above, depth, "top view, up as in the images")
    _draw_text(figure.add_subplot(grid[1, 2]), capture, findings)
    canvas.draw()
    drawn = Image.frombuffer("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    sheet = draw_sheet(capture, findings, WIDTH)
    page = Image.new("RGB", (WIDTH, drawn.height + sheet.height), "white")
    page.paste(drawn, (0, 0))
    page.paste(sheet, (0, drawn.height))
    return page


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


def _draw_space(axes: Any, capture: Capture, basis: Tensor, depth: float) -> None:
    """Draws points, box and frusta onto the plane of a basis (2, 3)."""
    if len(capture.points):
        chosen = torch.linspace(0, len(capture.points) - 1, min(_POINTS, len(capture.points))).long()
        x, y = (capture.points[chosen] @ basis.T).T.numpy()
        axes.scatter(x, y, s=2.5, c=capture.colors[chosen].numpy() / 255, linewidths=0, alpha=0.7, zorder=1)
    corners = torch.stack([capture.aabb[[index >> axis & 1 for axis in range(3)], range(3)] for index in range(8)])
    edges = (corners @ basis.T)[torch.tensor(_EDGES)]
    axes.add_collection(LineCollection(list(edges.numpy()), colors=BOX, linewidths=1.4, zorder=2))
    sizes = torch.tensor(capture.sizes, dtype=torch.float64)
    lines = frustum_lines(capture.c2w, capture.intrinsics, sizes, depth) @ basis.T
    width = 1.0 if len(capture) <= 60 else 0.6
    for number, split in enumerate(dict.fromkeys(capture.splits)):
        ours = torch.tensor([name == split for name in capture.splits])
        color = split_color(split)
        axes.add_collection(
            LineCollection(list(lines[ours].flatten(0, 1).numpy()), colors=color, linewidths=width, zorder=3 + number)
        )
        x, y = (capture.origins[ours] @ basis.T).T.numpy()
        axes.scatter(x, y, s=5, color=color, linewidths=0, zorder=3 + number)


def _draw_view(axes: Any, capture: Capture, basis: Tensor, depth: float, title: str, near: float | None = None) -> None:
    """Draws everything along a direction that is none of the world's axes; with ``near``, so much around cameras."""
    _draw_space(axes, capture, basis, depth)
    shown = capture.origins if near else torch.cat((capture.origins, torch.cartesian_prod(*capture.aabb.T)))
    centre, span = _centre_and_span(shown @ basis.T)
    span = 1.25 * max(span, near or 0.0)
    # Below is room for the scale.
    _frame(axes, centre - torch.tensor([0.0, 0.08 * span]), span)
    _draw_scale(axes, basis)
    axes.set_title(title, fontsize=12)


def _draw_scale(axes: Any, basis: Tensor) -> None:
    """Replaces a drawing's ticks by a bar of a round length and the directions of the world's axes."""
    axes.set_xticks([])
    axes.set_yticks([])
    (left, right), (bottom, _) = axes.get_xlim(), axes.get_ylim()
    span = right - left
    length = 10 ** math.floor(math.log10(span / 4))
    length *= max(factor for factor in (1, 2, 5) if factor * length <= span / 4)
    x, y = right - 0.05 * span, bottom + 0.05 * span
    axes.plot([x - length, x], [y, y], color=BOX, linewidth=3, solid_capstyle="butt", zorder=9)
    unit = "unit" if length == 1 else "units"
    axes.text(x - length / 2, y + 0.015 * span, f"{length:g} {unit}", ha="center", va="bottom", zorder=9)
    foot = torch.tensor([left + 0.11 * span, bottom + 0.13 * span])
    for name, color, direction in zip(_AXES, _AXIS_COLORS, basis.T, strict=True):
        if float(direction.norm()) < 0.25:  # towards the viewer
            continue
        tip, label = foot + 0.07 * span * direction, foot + 0.095 * span * direction
        axes.plot(*zip(foot.tolist(), tip.tolist(), strict=True), color=color, linewidth=2, zorder=9)
        axes.text(*label.tolist(), name, color=color, ha="center", va="center", zorder=9)


def _draw_text(axes: Any, capture: Capture, findings: Sequence[Finding]) -> None:
    axes.set_axis_off()
    handles = [
        Line2D([], [], color=split_color(name), linewidth=2, label=f"{name} cameras")
        for name in dict.fromkeys(capture.splits)
    ]
    handles.append(Line2D([], [], color=BOX, linewidth=1.4, label="box"))
    if len(capture.points):
        handles.append(Line2D([], [], color=MUTED, marker=".", linestyle="", label="sparse points"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.02, 1.02), frameon=False, ncols=2, fontsize=11)
    lines = [(line, BOX) for label, text in figures(capture) for line in _wrapped(f"{label}: {text}")]
    lines.append(("", BOX))
    if findings:
        lines += [(line, WARNING) for finding in findings for line in _wrapped(f"{finding.title}: {finding.message}")]
    else:
        lines.append(("nothing unusual was found", BOX))
    step = min(0.036, 0.86 / len(lines))
    for number, (line, color) in enumerate(lines):
        axes.text(
            0.0,
            0.87 - number * step,
            line,
            color=color,
            fontsize=min(10.5, 290 * step),
            va="top",
            transform=axes.transAxes,
        )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 62, subsequent_indent="    ")


def _frame(axes: Any, centre: Tensor, span: float) -> None:
    """Shows a square, so that units are equally long in both directions."""
    half = 0.55 * max(span, 1e-9)
    x, y = centre.tolist()
    axes.set_xlim(x - half, x + half)
    axes.set_ylim(y - half, y + half)
    axes.set_aspect("equal")


def _centre_and_span(points: Tensor) -> tuple[Tensor, float]:
    low, high = points.amin(dim=0), points.amax(dim=0)
    return (low + high) / 2, float((high - low).max())


def _spacing(capture: Capture) -> float:
    """Returns the depth of frusta that touch, but do not cover, their neighbours."""
    return 1.5 * float(nearest_distances(capture.origins).median()) if len(capture) > 1 else math.inf


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
