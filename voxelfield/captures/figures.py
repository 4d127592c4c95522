"""A capture in figures: rows of a label and a text, for the page, the picture and the terminal."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.captures.capture import Capture

_AGREEMENT = 0.3
"""Length of the mean up direction below which it is not meaningful."""


def upright(capture: Capture) -> Tensor | None:
    """Returns the unit direction (3,) that is up in most images, or None where images disagree."""
    return F.normalize(capture.up, dim=0) if float(capture.up.norm()) > _AGREEMENT else None


def figures(capture: Capture) -> list[tuple[str, str]]:
    """Returns the figures of a capture, as labels and texts of one line each."""
    splits = Counter(capture.splits)
    sizes = Counter(f"{width} x {height}" for width, height in capture.sizes)
    distances = (capture.origins - capture.aabb.mean(dim=0)).norm(dim=-1)
    spread = capture.origins.amax(dim=0) - capture.origins.amin(dim=0)
    low, high = capture.aabb
    rows = [
        ("format", capture.format),
        ("views", f"{len(capture)}: {', '.join(f'{count} {name}' for name, count in splits.items())}"),
        ("image size", f"{_counted(sizes)} pixels"),
        ("focal length, x", f"{_range(capture.intrinsics[:, 0])} pixels"),
        ("focal length, y", f"{_range(capture.intrinsics[:, 1])} pixels"),
        ("field of view, horizontal", f"{_range(capture.fields_of_view[:, 0])} degrees"),
        ("field of view, vertical", f"{_range(capture.fields_of_view[:, 1])} degrees"),
        ("box", f"{_vector(low)} to {_vector(high)}"),
        ("size of the box", f"{_vector(high - low)} units"),
        *([] if capture.warp is None else [capture.warp.summary]),
        ("extent of the cameras", f"{_vector(spread)} units"),
        ("distance to the box's centre", f"{_range(distances)} units"),
    ]
    if len(capture) > 1:
        rows.append(("distance to the nearest camera", f"{_range(nearest_distances(capture.origins))} units"))
    up = upright(capture)
    if up is None:
        rows.append(("up direction", "none: the images differ too much"))
    else:
        tilt = float(up[2].clamp(-1, 1).acos().rad2deg())
        rows.append(("up direction, mean of the images", f"{_vector(up)}, {tilt:.1f} degrees from z"))
    if len(capture.points):
        inside = ((capture.points >= low) & (capture.points <= high)).all(dim=-1).double().mean()
        rows.append(("sparse points", f"{len(capture.points)}, of which {100 * float(inside):.0f} % in the box"))
    else:
        rows.append(("sparse points", "none"))
    if any(capture.transparency):
        share = 100 * sum(capture.transparency) / len(capture)
        some = sum(share > 0 for share in capture.transparency)
        rows.append(("transparent pixels", f"{share:.2g} % of all, in {some} of {len(capture)} images"))
    rows.append(("coordinates", "right-handed world as in the files; cameras look along -z, with y up"))
    return rows


def nearest_distances(origins: Tensor) -> Tensor:
    """Returns the distance (N,) from each of the positions (N, 3), N at least 2, to the nearest other."""
    distances = torch.cdist(origins, origins)
    return distances.fill_diagonal_(torch.inf).amin(dim=-1)


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
