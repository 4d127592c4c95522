"""Inspection of a scene before training: its measures, probable problems, a picture and a page."""

from __future__ import annotations

import base64
import io
import logging
import logging.handlers
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image
from torch import Tensor

from voxelfield.captures.capture import Capture, read_capture
from voxelfield.captures.checks import Finding, check_capture
from voxelfield.captures.drawing import draw, nearest_distances
from voxelfield.files import atomic_write
from voxelfield.messages import one_line, printable

PICTURE = "inspect.png"
"""Name of the picture."""

PAGE = "inspect.html"
"""Name of the page."""

_MAX_VIEWS = 200  # on the page, besides those with a finding
_AGREEMENT = 0.3  # length of the mean up direction below which it is not meaningful


def inspect_scene(
    folder: Path, out: Path, aabb: Sequence[Sequence[float]] | None = None, model: int | None = None
) -> tuple[list[tuple[str, str]], list[Finding]]:
    """Reads a scene, checks it, and writes its picture and page.

    Args:
        folder: Folder of the scene, in any format that :func:`voxelfield.datasets.loading.load_scene` reads.
        out: Folder for :data:`PICTURE` and :data:`PAGE`; created if missing.
        aabb: (2, 3) box in world units; None for that of the format.
        model: Number of the COLMAP model where a folder has several; None: the one with the most images.

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
    rows, findings = measures(capture), check_capture(capture)
    notes = [Finding("loading", one_line(printable(record.getMessage()))) for record in warnings.buffer]
    picture = draw(capture)
    with atomic_write(out / PICTURE) as file:
        file.write(picture)
    with atomic_write(out / PAGE) as file:
        file.write(make_page(capture, rows, [*notes, *findings], picture).encode())
    return rows, findings


def make_page(capture: Capture, rows: Sequence[tuple[str, str]], findings: Sequence[Finding], picture: bytes) -> str:
    """Returns an HTML page that needs no other file: warnings, measures, the picture and the images.

    Args:
        capture: The capture.
        rows: Labels and texts of its measures.
        findings: The warnings, which also mark the images that they are about.
        picture: A PNG file.
    """
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
            "image": _data_uri(_jpeg(capture.thumbnails[index]), "jpeg"),
        }
        for index in sorted({*spread, *titles})
    ]
    environment = Environment(
        loader=PackageLoader("voxelfield.captures", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(PAGE).render(
        name=capture.name,
        count=len(capture),
        rows=rows,
        findings=findings,
        picture=_data_uri(picture, "png"),
        views=views,
    )


def _data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG")
    return file.getvalue()


def measures(capture: Capture) -> list[tuple[str, str]]:
    """Returns the measures of a capture, as labels and texts of one line each."""
    splits = Counter(capture.splits)
    sizes = Counter(f"{width} x {height}" for width, height in capture.sizes)
    distances = (capture.origins - capture.aabb.mean(dim=0)).norm(dim=-1)
    low, high = capture.aabb
    rows = [
        ("format", capture.format),
        ("views", f"{len(capture)}: {', '.join(f'{count} {name}' for name, count in splits.items())}"),
        ("image size", f"{_counted(sizes)} pixels"),
        ("cameras", _counted(Counter(["pinhole"] * len(capture) if capture.lens is None else capture.lens.models))),
        ("focal length, x", f"{_range(capture.intrinsics[:, 0])} pixels"),
        ("focal length, y", f"{_range(capture.intrinsics[:, 1])} pixels"),
        ("field of view, horizontal", f"{_range(capture.fields_of_view[:, 0])} degrees"),
        ("field of view, vertical", f"{_range(capture.fields_of_view[:, 1])} degrees"),
        ("box", f"{_vector(low)} to {_vector(high)}"),
        ("size of the box", f"{_vector(high - low)} units"),
    ]
    if capture.motion is not None:
        turn, move = capture.motion.unbind(dim=-1)
        some = int(capture.motion.any(dim=-1).sum())
        rows.append(
            (
                "rolling shutter",
                f"{some} of {len(capture)} images, during which cameras turn by {_range(turn.rad2deg())} degrees and "
                f"move by {_range(move)} units",
            )
        )
    if capture.warp is not None:
        rows.append(capture.warp.summary)
    spread = capture.origins.amax(dim=0) - capture.origins.amin(dim=0)
    rows.append(("extent of the cameras", f"{_vector(spread)} units"))
    rows.append(("distance to the box's centre", f"{_range(distances)} units"))
    if len(capture) > 1:
        rows.append(("distance to the nearest camera", f"{_range(nearest_distances(capture.origins))} units"))
    up, agreement = capture.up, float(capture.up.norm())
    if agreement < _AGREEMENT:
        rows.append(("up direction", "none: the images differ too much"))
    else:
        tilt = float((up[2] / agreement).clamp(-1, 1).acos().rad2deg())
        direction = f"{_vector(up / agreement)}, {tilt:.1f} degrees from z"
        rows.append(("up direction, mean of the images", direction))
    if len(capture.points):
        inside = ((capture.points >= low) & (capture.points <= high)).all(dim=-1).double().mean()
        rows.append(("sparse points", f"{len(capture.points)}, of which {100 * float(inside):.0f} % in the box"))
    if any(capture.transparency):
        percent = 100 * sum(capture.transparency) / len(capture)
        some = sum(share > 0 for share in capture.transparency)
        rows.append(("transparent pixels", f"{percent:.2g} % of all, in {some} of {len(capture)} images"))
    rows.append(("coordinates", "right-handed world as in the files; cameras look along -z, with y up"))
    return rows


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
