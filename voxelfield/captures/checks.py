"""Checks for common problems of captures: each function takes the capture and returns a finding or None."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.captures.capture import Capture
from voxelfield.datasets.poses import OPENCV_AXES, likely_mistake, sees_box, turned_about
from voxelfield.warps.bounds import stray_cameras

FEW_VIEWS = 20
SCALES = (1e-4, 1e4)
"""Extents of a scene, in world units, beyond which float32 and the settings' defaults serve badly."""
BOX_RATIOS = (0.05, 20.0)
"""Half the diagonal of a box over the median distance of the cameras from its centre, beyond which one is wrong."""
FIELDS_OF_VIEW = (2.0, 150.0)
"""Degrees, beyond which a focal length is hardly that of a camera."""
BEYOND_BOX = 0.01
"""Share of the opaque pixels that may show something outside of the box at which a scene ends."""
BLURRED = 0.2
"""Share of the median sharpness below which an image counts as blurred."""
SAME_GREY = 3.0
"""Grey levels by which no pixel of two fingerprints differs if two images are the same."""

_SAME_PLACE = 1e-5  # of the extent of all cameras
_SAME_ANGLE = 0.01  # degrees
_ROLLED = 60.0  # degrees
_STEEP = 0.35  # cosine of the elevation beyond which up and down mean little to a camera
_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """Something that is likely wrong.

    Attributes:
        title: A few words.
        message: One line that names the images and the remedy.
        views: Indices of the views that it is about; none if it is about all.
    """

    title: str
    message: str
    views: tuple[int, ...] = ()


Check = Callable[[Capture], Finding | None]


def few_views(capture: Capture) -> Finding | None:
    """Warns of a capture with too few views to see every part from several sides."""
    if len(capture) >= FEW_VIEWS:
        return None
    return Finding(
        "few views", f"{len(capture)} views, but at least {FEW_VIEWS} are recommended: take more photographs"
    )


def photographs_without_pose(capture: Capture) -> Finding | None:
    """Warns of photographs that COLMAP found no pose for, which are left out."""
    left_out = capture.without_pose
    if not left_out:
        return None
    return Finding(
        "photographs without a pose",
        f"{len(capture)} of {len(capture) + len(left_out)} photographs have a pose, without one {_are(left_out)} "
        f"{_list(left_out)}: take more between them and the others, or look at another model (--model N)",
    )


def box_out_of_sight(capture: Capture) -> Finding | None:
    """Warns of cameras in whose images no part of the box lies."""
    blind = _indices(~_sees_box(capture, capture.c2w))
    if not blind:
        return None
    lack = f"{_some(capture, blind)} of {len(capture)} cannot see the box"
    turned = turned_about(capture.c2w)
    if len(blind) <= len(capture) // 2:
        remedy = "choose another scene.aabb, or leave these views out"
    elif int(_sees_box(capture, turned).sum()) > len(capture) - len(blind):
        remedy = OPENCV_AXES
    else:
        remedy = "check that poses are camera to world with OpenGL's axes (y up, looking along -z), and scene.aabb"
    return Finding("box out of sight", f"{lack}: {remedy}", blind)


def doubtful_poses(capture: Capture) -> Finding | None:
    """Warns of poses that probably have another convention; see :func:`voxelfield.datasets.poses.likely_mistake`."""
    mistake = likely_mistake(capture.c2w)
    return None if mistake is None else Finding("doubtful poses", mistake)


def cameras_astray(capture: Capture) -> Finding | None:
    """Warns of a few cameras far from all others; see :func:`voxelfield.warps.bounds.stray_cameras`."""
    astray = _indices(stray_cameras(capture.c2w))
    if not astray:
        return None
    others = [index for index in range(len(capture)) if index not in astray]
    centre = capture.origins[others].mean(dim=0)
    distances = (capture.origins - centre).norm(dim=-1)
    return Finding(
        "stray cameras",
        f"{_some(capture, astray)} {_are(astray)} up to {float(distances[list(astray)].max()):.3g} units away, and the "
        f"{len(others)} others within {float(distances[others].max()):.3g} units of their middle: leave them out, "
        "unless the photographs were taken there",
        astray,
    )


def absurd_scale(capture: Capture) -> Finding | None:
    """Warns of scenes that are tiny or huge in their units."""
    low, high = SCALES
    corners = torch.cat((capture.origins, capture.aabb))
    extent = float((corners.amax(dim=0) - corners.amin(dim=0)).max())
    if low <= extent <= high:
        return None
    return Finding(
        "absurd scale",
        f"cameras and box are {extent:.3g} units across, expected {low:g} to {high:g}: scale the poses so that "
        "the cameras are a few units from the subject",
    )


def box_unlike_cameras(capture: Capture) -> Finding | None:
    """Warns of a box that is much larger or smaller than the cameras' distances from it."""
    low, high = BOX_RATIOS
    distance = float((capture.origins - capture.aabb.mean(dim=0)).norm(dim=-1).median())
    half = float((capture.aabb[1] - capture.aabb[0]).norm()) / 2
    if low * distance <= half <= high * distance:
        return None
    size = "large" if half > high * distance else "small"
    return Finding(
        f"{size} box",
        f"half of its diagonal is {half:.3g} units, and the cameras are {distance:.3g} units from its centre: set "
        "scene.aabb to a box around the subject, in the units of the poses",
    )


def box_cuts_images(capture: Capture) -> Finding | None:
    """Warns of a box at which the scene ends although images show something beside it."""
    if not capture.beyond_box or float(np.mean(capture.beyond_box)) < BEYOND_BOX:
        return None
    beyond = [index for index, share in enumerate(capture.beyond_box) if share >= BEYOND_BOX]
    beyond.sort(key=lambda index: -capture.beyond_box[index])
    return Finding(
        "box cuts images",
        f"{100 * float(np.mean(capture.beyond_box)):.0f} % of the opaque pixels look past the box, most of them in "
        f"{_some(capture, beyond)}: enlarge scene.aabb, or make what lies beside the subject transparent",
        tuple(sorted(beyond)),
    )


def transparent_images(capture: Capture) -> Finding | None:
    """Warns of images that are transparent throughout, which training refuses."""
    blank = tuple(index for index, share in enumerate(capture.transparency) if share == 1)
    if not blank:
        return None
    return Finding(
        "transparent images",
        f"{_some(capture, blank)} {_are(blank)} transparent throughout, which training refuses: save every image with "
        "its alpha channel as it should be, or leave it out",
        blank,
    )


def mixed_orientation(capture: Capture) -> Finding | None:
    """Warns of portrait images among landscape ones, or the other way round, which may be files that were rotated."""
    portrait = [index for index, (width, height) in enumerate(capture.sizes) if height > width]
    landscape = [index for index, (width, height) in enumerate(capture.sizes) if width > height]
    fewer, word = min((portrait, "portrait"), (landscape, "landscape"), key=lambda pair: len(pair[0]))
    if not fewer:
        return None
    others = len(portrait) + len(landscape) - len(fewer)
    return Finding(
        "mixed orientation",
        f"{_list([capture.names[index] for index in fewer])} {_are(fewer)} {word} among {others} that are not: if the "
        "camera was not turned, rotate the files as the others are, or leave them out",
        tuple(fewer),
    )


def cameras_rolled(capture: Capture) -> Finding | None:
    """Warns of cameras that are upside-down or on their side compared with the others."""
    up = F.normalize(capture.up, dim=0)
    right, above = capture.c2w[:, :3, 0] @ up, capture.c2w[:, :3, 1] @ up
    rolled = _indices((torch.atan2(right, above).rad2deg().abs() > _ROLLED) & (torch.hypot(right, above) > _STEEP))
    if not rolled or len(rolled) > len(capture) // 2:
        return None
    return Finding(
        "rolled cameras",
        f"{_some(capture, rolled)} {_are(rolled)} upside down or sideways compared with the others: fine if the "
        "camera was held that way; otherwise rotate the images, or leave them out",
        rolled,
    )


def odd_field_of_view(capture: Capture) -> Finding | None:
    """Warns of focal lengths that are not positive, and of very narrow or wide fields of view."""
    low, high = FIELDS_OF_VIEW
    angles = capture.fields_of_view
    odd = _indices(((angles < low) | (angles > high)).any(dim=-1))
    if not odd:
        return None
    focal, angle = float(capture.intrinsics[odd[0], 0]), float(angles[odd[0], 0])
    return Finding(
        "odd field of view",
        f"{_some(capture, odd)} {_have(odd)} less than {low:g} or more than {high:g} degrees, the first {angle:.3g} "
        f"at a focal length of {focal:.4g} pixels: focal lengths must be in pixels of the image file, and above 0",
        odd,
    )


def blurred_images(capture: Capture) -> Finding | None:
    """Warns of images that are far less sharp than most."""
    median = float(np.median(capture.sharpness))
    blurred = tuple(index for index, found in enumerate(capture.sharpness) if found < BLURRED * median)
    if not blurred:
        return None
    return Finding(
        "blurred images",
        f"{_some(capture, blurred)} {_have(blurred)} less than {BLURRED:g} of the median sharpness: leave them out",
        blurred,
    )


def duplicate_images(capture: Capture) -> Finding | None:
    """Warns of images that are the same, or nearly so."""
    flat = capture.fingerprints.reshape(len(capture), -1)

    def same(index: int) -> list[int]:
        return np.flatnonzero(np.abs(flat[:index] - flat[index]).max(axis=-1) <= SAME_GREY).tolist() if index else []

    return _duplicates(capture, same, "duplicate images", "are nearly identical: leave out one of each pair")


def duplicate_poses(capture: Capture) -> Finding | None:
    """Warns of cameras in the same place that look the same way."""
    origins, rotations = capture.origins, capture.c2w[:, :3, :3]
    extent = float((origins - origins.mean(dim=0)).norm(dim=-1).max())
    # The difference, in the Frobenius norm, of two rotations that are `_SAME_ANGLE` apart.
    least = math.sqrt(2) * math.radians(_SAME_ANGLE)

    def same(index: int) -> list[int]:
        near = (origins[:index] - origins[index]).norm(dim=-1) <= _SAME_PLACE * extent
        alike = (rotations[:index] - rotations[index]).norm(dim=(-1, -2)) <= least
        return torch.nonzero(near & alike)[:, 0].tolist()

    return _duplicates(
        capture, same, "duplicate poses", "have the same pose: leave out one of each pair, or find the poses again"
    )


CHECKS: tuple[Check, ...] = (
    few_views,
    photographs_without_pose,
    box_out_of_sight,
    doubtful_poses,
    cameras_astray,
    absurd_scale,
    box_unlike_cameras,
    box_cuts_images,
    transparent_images,
    mixed_orientation,
    cameras_rolled,
    odd_field_of_view,
    blurred_images,
    duplicate_images,
    duplicate_poses,
)
"""All checks, in the order in which their findings are reported."""


def check_capture(capture: Capture) -> list[Finding]:
    """Returns what all checks find."""
    return [finding for check in CHECKS if (finding := check(capture)) is not None]


def _sees_box(capture: Capture, c2w: Tensor) -> Tensor:
    """Tells which cameras (N,) have something of the box within their images."""
    return sees_box(c2w, capture.intrinsics, torch.tensor(capture.sizes, dtype=torch.float64), capture.aabb)


def _duplicates(capture: Capture, same: Callable[[int], list[int]], title: str, remedy: str) -> Finding | None:
    """Makes a finding of pairs.

    Args:
        capture: Names the views.
        same: Returns the views before one that are the same.
        title: Title of the finding.
        remedy: The text after the names.
    """
    pairs = [(earlier[0], index) for index in range(len(capture)) if (earlier := same(index))]
    if not pairs:
        return None
    told = _list([f"{capture.names[one]} and {capture.names[other]}" for one, other in pairs])
    return Finding(title, f"{told} {remedy}", tuple(sorted({index for pair in pairs for index in pair})))


def _indices(chosen: Tensor) -> tuple[int, ...]:
    return tuple(torch.nonzero(chosen)[:, 0].tolist())


def _some(capture: Capture, views: Sequence[int]) -> str:
    return _list([capture.names[index] for index in views])


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _are(views: Sequence[object]) -> str:
    return "is" if len(views) == 1 else "are"


def _have(views: Sequence[int]) -> str:
    return "has" if len(views) == 1 else "have"
