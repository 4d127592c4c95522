"""Checks for common problems of finished runs."""

from __future__ import annotations

import math
import statistics

from voxelfield.captures.checks import Finding, listed
from voxelfield.report.record import Curve, RunRecord

REMEMBERED = 6.0  # lead in PSNR of training pixels over held-out views, above which a run counts as overfitted, dB
HARDLY_ALIKE = 16.0  # PSNR below which views hardly resemble their photographs, dB
# dB below the median from which a view counts as much worse than the others, if it is beyond their spread too.
OUTLIER = 6.0
# Occupied fractions of the box beyond which it counts as nearly empty, or as filled with fog.
NEARLY_EMPTY, NEARLY_FULL = 0.0005, 0.5
SHORT = 1000  # steps below which training is too short for conclusions about the capture
STILL_RISING = 0.3  # gain over the last fifth of training from which on more steps are worthwhile, dB
# Mean gain in dB from fitting exposures, from which on the photographs' exposures count as different.
EXPOSURE_GAIN = 1.0


def advise(record: RunRecord) -> list[Finding]:
    """Returns the problems of a run, the gravest first."""
    metrics, steps = record.metrics, record.metrics["steps"]
    psnr, fitted = metrics["psnr"], metrics.get("psnr_fitted", math.nan)
    evaluated, trained = metrics.get("psnr_fitted", psnr), record.last("train/psnr")
    occupied = record.last("train/occupancy")
    diverged, held_out = metrics.get("diverged", False), metrics.get("split") != "train"
    missing = next((message for message in record.logged if "images are missing" in message), "")
    scores = {row["name"]: row["psnr"] for row in metrics["per_view"]}
    middle, spread = statistics.median(scores.values()), statistics.pstdev(scores.values())
    worse = [name for name, score in scores.items() if score < middle - max(OUTLIER, 2.5 * spread)]
    skipped = math.fsum(value for _, value in record.curve("train/skipped_steps"))
    short = steps < SHORT and not diverged
    gained = 0.0 if diverged else _late_gain(record.curve("test/psnr"))
    # What is not known is NaN, of which all comparisons are false.
    checks = (
        (
            diverged,
            "training diverged",
            "training pixels are rendered clearly worse than by the untrained field: lower trainer.rates.grid and "
            "trainer.rates.network, for example by half",
        ),
        (
            short,
            "the run was short",
            f"{steps} steps give a first look, in which views may be blurred and empty space filled: more steps, such "
            f"as trainer.steps={2 * SHORT}, come before any other change",
        ),
        (
            psnr < HARDLY_ALIKE and not diverged and not short,
            "views hardly resemble their photographs",
            f"the mean PSNR is {psnr:.1f} dB: check poses, box and camera axes with `voxelfield inspect`",
        ),
        (
            occupied < NEARLY_EMPTY,
            "the box is nearly empty",
            f"{100 * occupied:.2g} % of its cells are occupied: choose a scene.aabb closer to the subject, and check "
            "that poses and box have the same unit",
        ),
        (
            occupied > NEARLY_FULL and not short,
            "the box is full of fog",
            f"{100 * occupied:.0f} % of its cells are occupied: check poses and box with `voxelfield inspect`, or "
            "raise trainer.loss.sparsity or trainer.loss.distortion",
        ),
        (missing, "images are missing", f"{missing}: restore them, or make sure that they are not needed"),
        (
            not held_out,
            "no view was held out",
            "the metrics are those of the training photographs, and say little about new views: set data.holdout=8",
        ),
        (
            held_out and trained - evaluated >= REMEMBERED,
            "the run overfits",
            f"training pixels reach {trained:.1f} dB, held-out views {evaluated:.1f} dB: take more photographs between "
            "the existing ones, lower trainer.finest_resolution, or raise trainer.loss.distortion; poses that are "
            "slightly off may have the same effect: compare with camera=adjust",
        ),
        (
            worse and len(scores) >= 4,
            "some views are much worse than the others",
            f"{listed(worse, 5)} of {len(scores)}, against a median of {middle:.1f} dB: check them for wrong poses, "
            "blur, different exposure and motion",
        ),
        (
            fitted - psnr >= EXPOSURE_GAIN,
            "photographs differ in exposure",
            f"with a fitted exposure, views reach {fitted:.1f} dB instead of {psnr:.1f} dB: compare psnr_fitted, and "
            "lock exposure and white balance for the next capture",
        ),
        (
            skipped > 0,
            "steps were skipped",
            f"{skipped:.0f} of {steps} were not finite: lower optimizer.grid_lr or optimizer.network_lr, or "
            "trainer.loss_scale where gradients are float16",
        ),
        (
            gained >= STILL_RISING and not short,
            "views were still improving",
            f"they gained {gained:.1f} dB in the last part of training: more steps, such as trainer.steps={2 * steps}, "
            "should improve them further",
        ),
    )
    return [Finding(title, message) for applies, title, message in checks if applies]


def _late_gain(curve: Curve) -> float:
    """Returns how much a curve rises in the last fifth of training; 0 if it has too few points."""
    if len(curve) < 3:
        return 0.0
    last, end = curve[-1]
    before = next(value for step, value in reversed(curve) if step <= 0.8 * last or step == curve[0][0])
    return end - before
