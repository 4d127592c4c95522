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
from voxelfield.datasets.measures import BLURRED, ENOUGH_SKY
from voxelfield.datasets.poses import COLMAP_AXES, OPENCV_AXES, likely_mistake, turned_about
from voxelfield.rendering.cameras import Cameras, sees_box, viewing_poses
from voxelfield.warps.choice import stray_cameras

FEW_VIEWS = 20
# Extents of a scene, in world units, beyond which float32 and the settings' defaults serve badly.
SCALES = (1e-4, 1e4)
# Half the diagonal of a box over the median distance of the cameras from its centre, beyond which one is wrong.
BOX_RATIOS = (0.05, 20.0)
FIELDS_OF_VIEW = (2.0, 150.0)  # degrees, beyond which a focal length is implausible
OBLONG, DISTORTED = 1.5, 0.8  # ratio of two focal lengths, and |k1|, beyond which a calibration is implausible
BEYOND_BOX = 0.01  # share of the opaque pixels that may show something outside of the box at which a scene ends
SAME_GREY = 3.0  # grey levels by which no pixel of two fingerprints differs if two images are the same
_SAME_POSITION = 1e-5  # of the extent of all cameras
_SAME_ANGLE = 0.01  # degrees
_ROLLED = 60.0  # degrees
_STEEP = 0.35  # cosine of the elevation beyond which up and down mean little to a camera


@dataclass(frozen=True)
class Finding:
    """A probable problem.

    Attributes:
        title: A few words.
        message: One line that names the images and the remedy.
        views: Indices of the affected views; none if all are.
    """

    title: str
    message: str
    views: tuple[int, ...] = ()


def few_views(capture: Capture) -> Finding | None:
    """Warns of a capture with too few views to see every part from several sides."""
    message = f"{len(capture)} views, but at least {FEW_VIEWS} are recommended: take more photographs"
    return Finding("few views", message) if len(capture) < FEW_VIEWS else None


def box_out_of_sight(capture: Capture) -> Finding | None:
    """Warns of cameras whose images show no part of the box."""
    blind = ~_sees_box(capture, capture.c2w)
    if int(blind.sum()) <= len(capture) // 2:
        remedy = "choose another scene.aabb, or leave these views out"
    elif int(_sees_box(capture, turned_about(capture.c2w)).sum()) > int((~blind).sum()):
        remedy = COLMAP_AXES if capture.format == "COLMAP" else OPENCV_AXES
    else:
        remedy = "check that poses are camera to world with OpenGL's axes (y up, looking along -z), and scene.aabb"
    return _about(capture, blind, "box out of sight", "{names} of {count} cannot see the box: " + remedy)


def doubtful_poses(capture: Capture) -> Finding | None:
    """Warns of poses that probably have another convention; see :func:`voxelfield.datasets.poses.likely_mistake`."""
    mistake = likely_mistake(viewing_poses(capture.c2w, capture.lens), capture.format)
    return None if mistake is None else Finding("doubtful poses", mistake)


def cameras_astray(capture: Capture) -> Finding | None:
    """Warns of a few cameras far from all others; see :func:`voxelfield.warps.choice.stray_cameras`."""
    astray = stray_cameras(capture.c2w)
    if not astray.any():
        return None
    distances = (capture.origins - capture.origins[~astray].mean(dim=0)).norm(dim=-1)
    far, near = (float(distances[some].max()) for some in (astray, ~astray))
    message = (
        f"{{names}} {{are}} up to {far:.3g} units away, and the {int((~astray).sum())} others within {near:.3g} units "
        "of their middle: leave them out, unless the photographs were taken there"
    )
    return _about(capture, astray, "stray cameras", message)


def absurd_scale(capture: Capture) -> Finding | None:
    """Warns of scenes that are tiny or huge in their units."""
    low, high = SCALES
    corners = torch.cat((capture.origins, capture.aabb))
    extent = float((corners.amax(dim=0) - corners.amin(dim=0)).max())
    message = (
        f"cameras and box are {extent:.3g} units across, expected {low:g} to {high:g}: scale the poses so that the "
        "cameras are a few units from the subject"
    )
    return None if low <= extent <= high else Finding("absurd scale", message)


def box_unlike_cameras(capture: Capture) -> Finding | None:
    """Warns of a box that is much larger or smaller than the cameras' distances from it."""
    low, high = BOX_RATIOS
    distance = float((capture.origins - capture.aabb.mean(dim=0)).norm(dim=-1).median())
    half = float((capture.aabb[1] - capture.aabb[0]).norm()) / 2
    message = (
        f"half of its diagonal is {half:.3g} units, and the cameras are {distance:.3g} units from its centre: set "
        "scene.aabb to a box around the subject, in the units of the poses"
    )
    title = f"{'large' if half > high * distance else 'small'} box"
    return None if low * distance <= half <= high * distance else Finding(title, message)


def box_cuts_images(capture: Capture) -> Finding | None:
    """Warns of a scene that ends at its box although images show something outside of it."""
    beyond = np.asarray(capture.beyond_box)
    if not len(beyond) or beyond.mean() < BEYOND_BOX:
        return None
    worst = [index for index in np.argsort(-beyond, kind="stable").tolist() if beyond[index] >= BEYOND_BOX]
    names = listed([capture.names[index] for index in worst])
    message = (
        f"{100 * beyond.mean():.0f} % of the opaque pixels look past the box, most of them in {names}: enlarge "
        "scene.aabb, or make everything beside the subject transparent"
    )
    return Finding("box cuts images", message, tuple(sorted(worst)))


def transparent_images(capture: Capture) -> Finding | None:
    """Warns of images that are transparent throughout, which training refuses."""
    message = (
        "{names} {are} transparent throughout, which training refuses: save every image with its proper alpha channel, "
        "or leave it out"
    )
    return _about(capture, [share == 1 for share in capture.transparency], "transparent images", message)


def sky_beyond_boxes(capture: Capture) -> Finding | None:
    """Tells of a sky, and of the setting for it, because a field alone paints it on its last box."""
    message = (
        f"{100 * capture.sky:.0f} % of all pixels look alike from all places, as a sky does: model=pyramid learns them "
        "as a panorama beyond the last box (model.environment=auto), and other models do with model.environment=map"
    )
    return None if capture.sky < ENOUGH_SKY else Finding("sky", message)


def mixed_orientation(capture: Capture) -> Finding | None:
    """Warns of portrait images among landscape ones, or the other way round, which may be files that were rotated."""
    portrait = [height > width for width, height in capture.sizes]
    landscape = [width > height for width, height in capture.sizes]
    fewer, word = min((portrait, "portrait"), (landscape, "landscape"), key=lambda pair: sum(pair[0]))
    message = (
        f"{{names}} {{are}} {word} among {max(sum(portrait), sum(landscape))} that are not: fine if the camera "
        "was turned; files that were rotated after their poses were found must be rotated back, or be left out"
    )
    return _about(capture, fewer, "mixed orientation", message)


def cameras_rolled(capture: Capture) -> Finding | None:
    """Warns of cameras that are upside-down or on their side compared with the others."""
    up = F.normalize(capture.up, dim=0)
    right, above = capture.c2w[:, :3, 0] @ up, capture.c2w[:, :3, 1] @ up
    rolled = (torch.atan2(right, above).rad2deg().abs() > _ROLLED) & (torch.hypot(right, above) > _STEEP)
    message = (
        "{names} {are} upside down or sideways compared with the others: fine if the camera was held that way; "
        "otherwise their poses are wrong: find them again, or leave these views out"
    )
    return None if int(rolled.sum()) > len(capture) // 2 else _about(capture, rolled, "rolled cameras", message)


def odd_field_of_view(capture: Capture) -> Finding | None:
    """Warns of focal lengths that are not positive, and of very narrow or wide fields of view."""
    low, high = FIELDS_OF_VIEW
    angles = capture.fields_of_view
    wide = angles > high
    if capture.lens is not None:
        wide &= ~capture.lens.is_sphere[:, None]
    odd = ((angles < low) | wide).any(dim=-1)
    first = int(odd.int().argmax())
    message = (
        f"{{names}} {{have}} less than {low:g} or more than {high:g} degrees, the first {float(angles[first, 0]):.3g} "
        f"at a focal length of {float(capture.intrinsics[first, 0]):.4g} pixels: focal lengths must be in pixels of "
        "the image file, and above 0"
    )
    return _about(capture, odd, "odd field of view", message)


def odd_lens(capture: Capture) -> Finding | None:
    """Warns of pixels far from square and of distortion that no photograph has, as failed calibrations give them."""
    fx, fy = capture.intrinsics[:, :2].unbind(dim=-1)
    k1 = torch.zeros(len(capture))
    if capture.lens is not None:
        lenses = map(capture.lens.described, range(len(capture)))
        k1 = torch.tensor([0.0 if model == "rational" else terms.get("k1", 0.0) for model, terms in lenses])
        fx = torch.where(capture.lens.is_sphere, fy, fx)
    odd = (torch.maximum(fx / fy, fy / fx) > OBLONG) | (k1.abs() > DISTORTED)
    first = int(odd.int().argmax())
    message = (
        f"{{names}} {{have}} implausible calibrations, the first fx {float(fx[first]):.4g}, fy {float(fy[first]):.4g} "
        f"and k1 {float(k1[first]):.3g}: find the poses again with a simpler camera model that all images share"
    )
    return _about(capture, odd, "odd lens", message)


def blurred_images(capture: Capture) -> Finding | None:
    """Warns of images that are far less sharp than most."""
    median = float(np.median(capture.sharpness))
    message = (
        f"{{names}} {{have}} less than {BLURRED:g} of the median sharpness: leave them out, or count them less with "
        "trainer.loss.sharpness=1"
    )
    return _about(capture, [value < BLURRED * median for value in capture.sharpness], "blurred images", message)


def duplicate_images(capture: Capture) -> Finding | None:
    """Warns of images that are the same, or nearly so."""
    flat = torch.from_numpy(capture.fingerprints).flatten(1)

    def same(index: int) -> Tensor:
        return (flat[:index] - flat[index]).abs().amax(dim=-1) <= SAME_GREY

    return _duplicates(capture, same, "duplicate images", "are nearly identical: leave out one of each pair")


def duplicate_poses(capture: Capture) -> Finding | None:
    """Warns of cameras in the same place that look the same way."""
    origins, rotations = capture.origins, capture.c2w[:, :3, :3]
    extent = float((origins - origins.mean(dim=0)).norm(dim=-1).max())
    # The difference, in the Frobenius norm, of two rotations that are `_SAME_ANGLE` apart.
    least = math.sqrt(2) * math.radians(_SAME_ANGLE)

    def same(index: int) -> Tensor:
        near = (origins[:index] - origins[index]).norm(dim=-1) <= _SAME_POSITION * extent
        return near & ((rotations[:index] - rotations[index]).norm(dim=(-1, -2)) <= least)

    remedy = "have the same pose: leave out one of each pair, or find the poses again"
    return _duplicates(capture, same, "duplicate poses", remedy)


CHECKS: tuple[Callable[[Capture], Finding | None], ...] = (
    few_views,
    box_out_of_sight,
    doubtful_poses,
    cameras_astray,
    absurd_scale,
    box_unlike_cameras,
    box_cuts_images,
    transparent_images,
    sky_beyond_boxes,
    mixed_orientation,
    cameras_rolled,
    odd_field_of_view,
    odd_lens,
    blurred_images,
    duplicate_images,
    duplicate_poses,
)
"""All checks, in the order in which their findings are reported."""


def check_capture(capture: Capture) -> list[Finding]:
    """Returns the findings of all checks."""
    return [finding for check in CHECKS if (finding := check(capture)) is not None]


def _sees_box(capture: Capture, c2w: Tensor) -> Tensor:
    """Tells which cameras (N,) have some part of the box within their images."""
    sizes = torch.tensor(capture.sizes)
    cameras = Cameras.of_sizes(c2w.float(), capture.intrinsics.float(), sizes, capture.lens)
    return sees_box(cameras, capture.aabb.float())


def _about(capture: Capture, chosen: Tensor | Sequence[bool], title: str, message: str) -> Finding | None:
    """Returns a finding about the chosen views, None if there are none; the message has ``{names}`` and verbs."""
    views = tuple(np.flatnonzero(np.asarray(chosen)).tolist())
    if not views:
        return None
    are, have = ("is", "has") if len(views) == 1 else ("are", "have")
    names = listed([capture.names[index] for index in views])
    return Finding(title, message.format(names=names, are=are, have=have, count=len(capture)), views)


def _duplicates(capture: Capture, same: Callable[[int], Tensor], title: str, remedy: str) -> Finding | None:
    """Returns a finding about pairs; ``same(index)`` returns which earlier views of its time equal a view."""
    times = torch.zeros(len(capture)) if capture.times is None else capture.times
    found = [(same(index) & (times[:index] == times[index])).nonzero() for index in range(len(capture))]
    pairs = [(int(earlier[0]), index) for index, earlier in enumerate(found) if len(earlier)]
    if not pairs:
        return None
    names = listed([f"{capture.names[one]} and {capture.names[other]}" for one, other in pairs])
    return Finding(title, f"{names} {remedy}", tuple(sorted({index for pair in pairs for index in pair})))


def listed(names: Sequence[str], count: int = 3) -> str:
    """Returns the first ``count`` names, and the number of the others."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")
