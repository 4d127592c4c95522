"""Checks for common problems of finished runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from voxelfield.captures.checks import Finding, listed
from voxelfield.report.record import RunRecord

REMEMBERED = 6.0
"""PSNR lead, in dB, of training pixels over held-out views above which a run counts as overfitted."""
HARDLY_ALIKE = 16.0
"""dB of PSNR below which views hardly resemble their photographs."""
OUTLIER = 6.0
"""dB below the median from which a view counts as much worse than the others, if it is beyond their spread too."""
NEARLY_EMPTY, NEARLY_FULL = 0.0005, 0.5
"""Occupied fractions of the box beyond which it counts as nearly empty, or as filled with fog."""
STILL_RISING = 0.3
"""Gain in dB over the last fifth of training from which on more steps are worthwhile."""
EXPOSURE_GAIN = 1.0
"""Mean gain in dB from fitting exposures, from which on the photographs' exposures count as different."""


def advise(record: RunRecord) -> list[Finding]:
    """Returns the problems of a run, the gravest first."""
    return [*_of_field(record), *_of_views(record), *_of_steps(record)]


def _of_field(record: RunRecord) -> Iterator[Finding]:
    """Yields problems of the field as a whole."""
    psnr = record.metrics["psnr"]
    if record.metrics.get("diverged", False):
        yield Finding(
            "training diverged",
            "training pixels are rendered clearly worse than by the untrained field: lower trainer.rates.grid and "
            "trainer.rates.network, for example by half",
        )
    elif psnr < HARDLY_ALIKE:
        yield Finding(
            "views hardly resemble their photographs",
            f"the mean PSNR is {psnr:.1f} dB: check poses, box and camera axes with `voxelfield inspect`, and train "
            "longer than a smoke test",
        )
    occupied = record.last("train/occupancy")
    if occupied is not None and occupied < NEARLY_EMPTY:
        yield Finding(
            "the box is nearly empty",
            f"{100 * occupied:.2g} % of its cells are occupied: choose a scene.aabb closer to the subject, and check "
            "that poses and box have the same unit",
        )
    if occupied is not None and occupied > NEARLY_FULL:
        yield Finding(
            "the box is full of fog",
            f"{100 * occupied:.0f} % of its cells are occupied: check poses and box with `voxelfield inspect`, or "
            "raise trainer.loss.sparsity or trainer.loss.distortion",
        )


def _of_views(record: RunRecord) -> Iterator[Finding]:
    """Yields problems of the evaluated views and the photographs."""
    metrics = record.metrics
    missing = next((message for message in record.logged if "images are missing" in message), None)
    if missing is not None:
        yield Finding("images are missing", f"{missing}: restore them, or make sure that they are not needed")
    psnr, fitted, trained = metrics["psnr"], metrics.get("psnr_fitted"), record.last("train/psnr")
    evaluated = psnr if fitted is None else fitted
    if metrics.get("split") == "train":
        yield Finding(
            "no view was held out",
            "the metrics are those of the training photographs, and say little about new views: set data.holdout=8",
        )
    elif trained is not None and trained - evaluated >= REMEMBERED:
        yield Finding(
            "the run overfits",
            f"training pixels reach {trained:.1f} dB, held-out views {evaluated:.1f} dB: take more photographs between "
            "the existing ones, lower trainer.finest_resolution, or raise trainer.loss.distortion; poses that are "
            "slightly off may have the same effect: compare with camera=adjust",
        )
    scores = {row["name"]: row["psnr"] for row in metrics["per_view"]}
    middle, spread = statistics.median(scores.values()), statistics.pstdev(scores.values())
    worse = [name for name, score in scores.items() if score < middle - max(OUTLIER, 2.5 * spread)]
    if worse and len(scores) >= 4:
        yield Finding(
            "some views are much worse than the others",
            f"{listed(worse, 5)} of {len(scores)}, against a median of {middle:.1f} dB: check them for wrong poses, "
            "blur, different exposure and motion",
        )
    if fitted is not None and fitted - psnr >= EXPOSURE_GAIN:
        yield Finding(
            "photographs differ in exposure",
            f"with a fitted exposure, views reach {fitted:.1f} dB instead of {psnr:.1f} dB: compare psnr_fitted, and "
            "lock exposure and white balance for the next capture",
        )


def _of_steps(record: RunRecord) -> Iterator[Finding]:
    """Yields problems of the training."""
    steps, skipped = record.metrics["steps"], math.fsum(value for _, value in record.curve("train/skipped_steps"))
    if skipped > 0:
        yield Finding(
            "steps were skipped",
            f"{skipped:.0f} of {steps} were not finite: lower optimizer.grid_lr or optimizer.network_lr, or "
            "trainer.loss_scale where gradients are float16",
        )
    curve = record.curve("test/psnr")
    if len(curve) < 3 or record.metrics.get("diverged", False):
        return
    last, end = curve[-1]
    before = next(value for step, value in reversed(curve) if step <= 0.8 * last or step == curve[0][0])
    if end - before >= STILL_RISING:
        yield Finding(
            "views were still improving",
            f"they gained {end - before:.1f} dB in the last part of training: more steps, such as "
            f"trainer.steps={2 * steps}, should improve them further",
        )
