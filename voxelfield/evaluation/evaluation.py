"""Evaluation of a trained field: rendered views against ground truth, metrics file, table of views."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import torch

from voxelfield.datasets.scene import Split
from voxelfield.devices import Uploads
from voxelfield.evaluation.metrics import cross_fitted, psnr, ssim
from voxelfield.files import is_replaceable, write_file
from voxelfield.media.png import BackgroundWriter
from voxelfield.progress import tracked
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.pixels import composite_background
from voxelfield.rendering.render import View

OnView: TypeAlias = "Callable[[str, View, torch.Tensor, torch.Tensor | None], None]"
"""A callback for each evaluated view, with its name, the rendered view, the ground truth (H, W, 3) in [0, 1], and a
mask (H, W) bool of the pixels that count, or None for all; the tensors are on the renderer's device."""


@dataclass(frozen=True)
class Evaluation:
    """Quality over the views of a split.

    Attributes:
        names: Names of the views, in the order they were rendered.
        scores: Metrics of each view, by name: ``psnr`` in dB, ``ssim`` and, if requested, ``lpips``; with fitted
            exposures, ``psnr_fitted`` and ``ssim_fitted``.
    """

    names: tuple[str, ...]
    scores: Mapping[str, tuple[float, ...]]

    def means(self) -> dict[str, float]:
        """Returns the means over the views, by name; for PSNR the mean of the views' PSNR, as in NeRF papers."""
        return {name: math.fsum(values) / len(values) for name, values in self.scores.items()}

    @property
    def psnr(self) -> float:
        """Mean of the views' PSNR in dB."""
        return self.means()["psnr"]

    @property
    def ssim(self) -> float:
        """Mean of the views' SSIM."""
        return self.means()["ssim"]

    @property
    def lpips(self) -> float | None:
        """Mean of the views' LPIPS, or None if not requested."""
        return self.means().get("lpips")

    def per_view(self) -> list[dict[str, str | float]]:
        """Returns a row for each view: ``name`` and its scores."""
        columns = {"name": self.names, **self.scores}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    @classmethod
    def joined(cls, evaluations: Sequence[Evaluation], names: Iterable[str]) -> Evaluation:
        """Joins evaluations of different views into one of the named views, in the order of the names."""
        scores: dict[str, dict[str, float]] = {}
        for evaluation in evaluations:
            for name, values in evaluation.scores.items():
                scores.setdefault(name, {}).update(zip(evaluation.names, values, strict=True))
        order = tuple(names)
        return cls(order, {name: tuple(values[view] for view in order) for name, values in scores.items()})

    def __str__(self) -> str:
        """Returns the means in one line."""
        means = self.means()
        text = f"PSNR {self.psnr:.2f} dB, SSIM {self.ssim:.4f}"
        text += "" if self.lpips is None else f", LPIPS {self.lpips:.4f}"
        if "psnr_fitted" in means:
            text += f"; with fitted exposure PSNR {means['psnr_fitted']:.2f} dB, SSIM {means['ssim_fitted']:.4f}"
        return text


def evenly_spaced(count: int, total: int) -> list[int]:
    """Returns ``count`` indices spread evenly over ``range(total)``, or all of them if ``count`` is not smaller."""
    return [index * total // count for index in range(count)] if count < total else list(range(total))


def evaluate_split(
    render_view: Callable[[Cameras, int], View],
    split: Split,
    background: torch.Tensor,
    *,
    views: Sequence[int] | None = None,
    lpips: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    fit_exposure: bool = False,
    environment: bool = False,
    on_view: Sequence[OnView] = (),
    progress: bool = True,
) -> Evaluation:
    """Renders views of a split and compares them with the ground truth.

    Metrics are computed on the rendered image clamped to [0, 1] but not rounded to 8 bits. The ground truth is
    composited over ``background``, as in previews. If the split has masks, PSNR is computed over the pixels that count,
    and for SSIM and LPIPS the other pixels are replaced by the ground truth.

    Args:
        render_view: Called with the split's cameras and a camera index; renders that view on any device.
        split: Images with their cameras and names.
        background: (3,) the colour over which ``render_view`` composites.
        views: Indices of the views to evaluate; None means all. Without any, there are no scores.
        lpips: Compares two images (H, W, 3), like :class:`voxelfield.evaluation.metrics.Lpips`; None for no LPIPS.
        fit_exposure: Evaluate each view a second time, after :func:`voxelfield.evaluation.metrics.cross_fitted`.
        environment: Whether views show an environment and not ``background``, so that a fitted exposure applies to all
            of their pixels.
        on_view: Called with each view; they should not synchronise with the device.
        progress: Display how many views are done.

    Raises:
        ValueError: A rendered image has another size than its ground truth.
        FloatingPointError: A rendered image contains NaN or infinity.
    """
    # All at once, because copying each camera separately would wait for the views before it.
    cameras, uploads = split.cameras.to(background.device), Uploads()
    names: list[str] = []
    scores: list[torch.Tensor] = []
    figures: dict[str, torch.Tensor] = {}
    for index in tracked(range(len(split)) if views is None else views, "evaluating views", silent=not progress):
        with torch.no_grad():
            name, view = split.names[index], render_view(cameras, index)
            device, rgb, counted = view.rgb.device, view.rgb.clamp(0, 1), split.mask(index)
            truth = composite_background(uploads.to(split.image(index), device), background)
            if rgb.shape != truth.shape:
                raise ValueError(f"rendered view {name!r} must have shape {tuple(truth.shape)}, got {tuple(rgb.shape)}")
            mask = None if counted is None else uploads.to(counted, device)
            shown = rgb if mask is None else torch.where(mask[..., None], rgb, truth)
            bad = (~view.rgb.isfinite()).any(dim=-1).sum()
            figures = {"bad": bad.float(), "psnr": psnr(rgb, truth, mask), "ssim": ssim(shown, truth)}
            if lpips is not None:
                # The network rejects NaN with another message; views with NaN are rejected below.
                figures["lpips"] = lpips(shown.nan_to_num(), truth)
            if fit_exposure:
                opacity = torch.ones_like(view.opacity) if environment else view.opacity
                fitted = cross_fitted(rgb, opacity, truth, background, mask)
                shown = fitted if mask is None else torch.where(mask[..., None], fitted, truth)
                figures |= {"psnr_fitted": psnr(fitted, truth, mask), "ssim_fitted": ssim(shown, truth)}
            # Left on the device: reading each number immediately would delay the launch of the next view.
            scores.append(torch.stack(list(figures.values())))
        names.append(name)
        for call in on_view:
            call(name, view, truth, mask)
    rows = [row.cpu().to(torch.float64).tolist() for row in scores]
    measured = dict(zip(figures, zip(*rows, strict=True), strict=True)) if rows else {}
    for name, count in zip(names, measured.pop("bad", ()), strict=True):
        if count > 0:
            raise FloatingPointError(f"rendered view {name!r} has {int(count)} pixels that are NaN or infinite")
    return Evaluation(tuple(names), measured)


def write_table(path: Path, evaluation: Evaluation) -> None:
    """Writes :meth:`Evaluation.per_view` as a CSV file, atomically; its folder is created if needed."""
    rows = evaluation.per_view()
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, rows[0], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_file(path, text.getvalue().encode())


def write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Writes a run's metrics.json atomically, keys sorted; raises ValueError if a number is not finite."""
    text = json.dumps(metrics, indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_file(path, text.encode())


def picture_name(view: str) -> str:
    """Returns the file name of a view's image; it may contain subfolders but not lead out of the output folder.

    Raises ValueError if it does, or if the view's name is not in normal form, so that several could give one file.
    """
    parts = PurePosixPath(view)
    if parts.is_absolute() or ".." in parts.parts or not parts.name or str(parts) != view or "\0" in view:
        raise ValueError(f"view name must be a relative path without '.' and '..', got {view!r}")
    return f"{view}.png"


def save_images(folder: Path, writer: BackgroundWriter) -> OnView:
    """Returns a callback of an evaluation that writes each rendered view as ``<view name>.png``, with 8 bits."""
    return lambda name, view, truth, mask: writer.save(folder / picture_name(name), view.rgb)


def check_pictures(name: str, folder: Path, views: Iterable[str]) -> None:
    """Raises unless views can be written as images to a folder, which need not exist, without replacing other files.

    Raises:
        FileExistsError: A file that voxelfield has not written is in the place of an image.
        OSError: A file cannot have such a name.
        ValueError: A view's name gives no file name.
    """
    for view in views:
        path = folder / picture_name(view)
        if not is_replaceable(path):
            raise FileExistsError(
                f"{name} must be a folder whose images may be replaced by rendered views, got {folder}: voxelfield has "
                f"not written {path.relative_to(folder)}; choose another folder"
            )
