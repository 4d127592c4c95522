"""The picture of a capture: its cameras, box and points along the world's axes and at an angle."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from voxelfield.captures.capture import Capture

SPLITS = {"train": "#1f6fb4", "val": "#2e8b57", "test": "#d9660a"}
"""Colours of the splits' cameras."""

_GREY, _BOX = "#9aa0a6", "#202124"
_AXES = {"x": "#d93025", "y": "#1e8e3e", "z": "#1a73e8"}
_POINTS = 20_000
_ELEVATION, _AZIMUTH = math.radians(25.0), math.radians(35.0)
# Corners of a box, as bits of x, y and z; edges join those that differ in one bit.
_EDGES = torch.tensor([(one, one | bit) for one in range(8) for bit in (1, 2, 4) if not one & bit])


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
        axes.scatter(*points.T, s=2.5, color=_GREY, linewidths=0, alpha=0.7, zorder=1, label="sparse points")
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
