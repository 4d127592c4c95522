"""Checks for common problems of finished runs: each function takes the run's record and returns a finding or None."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from voxelfield.captures.checks import Finding
from voxelfield.report.record import RunRecord

REMEMBERED = 6.0
"""PSNR lead, in dB, of training pixels over held-out views above which a run counts as overfitted."""
HARDLY_ALIKE = 16.0
"""dB of PSNR below which views hardly resemble their photographs."""
OUTLIER = 6.0
"""dB below the median from which a view counts as much worse than the others, if it is beyond their spread too."""
NEARLY_EMPTY, NEARLY_FULL = 0.0005, 0.5
"""Occupied shares of the box beyond which it counts as nearly empty, or as filled with fog."""
STILL_RISING = 0.3
"""Gain in dB over the last fifth of training from which on more steps are worthwhile."""
HIDDEN = 0.01
"""Largest acceptable share of a view that is hidden by floaters right in front of its camera."""
EXPOSURE_GAIN = 1.0
"""Mean gain in dB from fitting exposures, from which on the photographs' exposures count as different."""

_NAMED = 5

Check = Callable[[RunRecord], Finding | None]


def diverged(record: RunRecord) -> Finding | None:
    """Warns of training that diverged."""
    if not record.metrics.get("diverged", False):
        return None
    return Finding(
        "training diverged",
        "training pixels are rendered clearly worse than by the untrained field: lower trainer.rates.grid and "
        "trainer.rates.network, for example by half",
    )


def hardly_alike(record: RunRecord) -> Finding | None:
    """Warns of views that hardly resemble their photographs, though training did not diverge."""
    psnr = record.metrics["psnr"]
    if psnr >= HARDLY_ALIKE or record.metrics.get("diverged", False):
        return None
    return Finding(
        "views hardly resemble their photographs",
        f"the mean PSNR is {psnr:.1f} dB: check poses, box and camera axes with `voxelfield inspect`, and train longer "
        "than a smoke test",
    )


def remembered_photographs(record: RunRecord) -> Finding | None:
    """Warns of overfitting: training pixels are reproduced far better than held-out views."""
    trained, evaluated = record.last("train/psnr"), record.metrics.get("psnr_fitted", record.metrics["psnr"])
    if trained is None or record.metrics.get("split") == "train" or trained - evaluated < REMEMBERED:
        return None
    return Finding(
        "the run overfits",
        f"training pixels reach {trained:.1f} dB, held-out views {evaluated:.1f} dB: take more photographs between "
        "the existing ones, lower trainer.finest_resolution, or raise trainer.loss.distortion; "
        "poses that are slightly off may have the same effect: compare with camera=adjust",
    )


def nothing_held_out(record: RunRecord) -> Finding | None:
    """Warns of figures that are those of the training images themselves."""
    if record.metrics.get("split") != "train":
        return None
    return Finding(
        "no view was held out",
        "the metrics are those of the training photographs, and say little about new views: set data.holdout=8",
    )


def missing_images(record: RunRecord) -> Finding | None:
    """Warns of views that were left out because their images are not there."""
    for message in record.logged:
        if "images are missing" in message:
            return Finding("images are missing", f"{message}: restore them, or make sure that they are not needed")
    return None


def occupied_space(record: RunRecord) -> Finding | None:
    """Warns of a box in which there is next to nothing, or fog."""
    share = record.last("train/occupancy")
    if share is None:
        return None
    if share < NEARLY_EMPTY:
        return Finding(
            "the box is nearly empty",
            f"{100 * share:.2g} % of its cells are occupied: choose a scene.aabb closer to the subject, and check "
            "that poses and box have the same unit",
        )
    if share > NEARLY_FULL:
        return Finding(
            "the box is full of fog",
            f"{100 * share:.0f} % of its cells are occupied: check poses and box with `voxelfield inspect`, or raise "
            "trainer.loss.sparsity or trainer.loss.distortion",
        )
    return None


def views_apart(record: RunRecord) -> Finding | None:
    """Warns of single views that are much worse than the others."""
    scores = {row["name"]: row["psnr"] for row in record.metrics["per_view"]}
    if len(scores) < 4:
        return None
    middle, spread = statistics.median(scores.values()), statistics.pstdev(scores.values())
    worse = [name for name, psnr in scores.items() if psnr < middle - max(OUTLIER, 2.5 * spread)]
    if not worse:
        return None
    return Finding(
        "some views are much worse than the others",
        f"{_some(worse)} of {len(scores)}, against a median of {middle:.1f} dB: check them for wrong poses, blur, "
        "different exposure and motion",
    )


def hidden_views(record: RunRecord) -> Finding | None:
    """Warns of floaters right in front of cameras."""
    hidden = [name for name, pictures in record.pictures.items() if pictures.hidden > HIDDEN]
    if not hidden:
        return None
    return Finding(
        "floaters near cameras",
        f"artefacts right in front of the camera hide part of {_some(hidden)}: raise warp.near (in an "
        "unbounded scene) or trainer.loss.distortion, or take photographs from there",
    )


def skipped_steps(record: RunRecord) -> Finding | None:
    """Warns of steps that were left out because they were not finite."""
    skipped = math.fsum(value for _, value in record.curve("train/skipped_steps"))
    if skipped == 0:
        return None
    return Finding(
        "steps were skipped",
        f"{skipped:.0f} of {record.metrics['steps']} were not finite: lower optimizer.grid_lr or optimizer.network_lr, "
        "or trainer.loss_scale where gradients are float16",
    )


def exposures_differ(record: RunRecord) -> Finding | None:
    """Notes that exposures differ between photographs, according to an evaluation with fitted exposure."""
    fitted = record.metrics.get("psnr_fitted")
    if fitted is None or fitted - record.metrics["psnr"] < EXPOSURE_GAIN:
        return None
    return Finding(
        "photographs differ in exposure",
        f"with a fitted exposure, views reach {fitted:.1f} dB instead of {record.metrics['psnr']:.1f} dB: compare "
        "psnr_fitted, and lock exposure and white balance for the next capture",
    )


def still_rising(record: RunRecord) -> Finding | None:
    """Notes that training ended while views were still becoming better."""
    curve = record.curve("test/psnr")
    if len(curve) < 3 or record.metrics.get("diverged", False):
        return None
    last, end = curve[-1]
    before = next(value for step, value in reversed(curve) if step <= 0.8 * last or step == curve[0][0])
    if end - before < STILL_RISING:
        return None
    return Finding(
        "views were still improving",
        f"they gained {end - before:.1f} dB in the last part of training: more steps, such as "
        f"trainer.steps={2 * record.metrics['steps']}, should improve them further",
    )


CHECKS: tuple[Check, ...] = (
    diverged,
    hardly_alike,
    occupied_space,
    missing_images,
    remembered_photographs,
    nothing_held_out,
    views_apart,
    hidden_views,
    exposures_differ,
    skipped_steps,
    still_rising,
)


def advise(record: RunRecord) -> list[Finding]:
    """Returns what all checks find, the gravest first.

    Args:
        record: The run.
    """
    return [finding for check in CHECKS if (finding := check(record)) is not None]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"
