"""The options that the loaders of all formats take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from voxelfield.datasets.images import Size


@dataclass(frozen=True)
class LoadOptions:
    """What to load of a scene, and how.

    Attributes:
        splits: Which of train, val and test; None: all that the scene has.
        image_size: Images with a side longer than this, in pixels, are shrunk until none is; None keeps them.
        downscale: Images are shrunk by this factor N first, or taken from the folder ``images_N`` of a capture.
        holdout: Every ``holdout``-th training view, sorted by path, is held out for the test in a scene without test
            or validation views; 0 holds none out.
        missing_images: ``error`` refuses a scene that lacks a listed image, ``skip`` leaves such views out and warns;
            None does what is usual for the format.
        lens_distortion: Whether rays are bent as the lenses bend them. Without, photographs count as undistorted: those
            of a fisheye as equidistant, all others as those of a pinhole.
        aabb: (2, 3) box that holds what matters, world units; None: as
            :func:`voxelfield.datasets.frames.make_scene` chooses.
        boxes: Number of nested boxes, the smallest of which is ``aabb``; 1: nothing is outside of it; None: several
            if no box is given and less than a tenth of the images is transparent; otherwise 1.
        near: Distance from a camera before which nothing is sampled, world units, with nested boxes; with ``ndc``, the
            depth of the near plane. None: as the cameras suggest.
        model: Number N of the COLMAP model ``sparse/N``, if a capture has several; None: the one with the most images.
        ndc: Whether a capture's grid lies in normalised device coordinates
            (:class:`voxelfield.warps.ndc_box.NdcBox`); None: if all cameras face the same way, points are
            known, and neither a box nor a number of boxes is given.

    Raises:
        ValueError: A value is none of these.
    """

    splits: Sequence[str] | None = ("train", "test")
    image_size: int | None = None
    downscale: int = 1
    holdout: int = 8
    missing_images: Literal["error", "skip"] | None = None
    lens_distortion: bool = True
    aabb: Tensor | Sequence[Sequence[float]] | None = None
    boxes: int | None = None
    near: float | None = None
    ndc: bool | None = None
    model: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("downscale", 1), ("image_size", 1), ("boxes", 1), ("model", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
        if self.holdout < 0 or self.holdout == 1:
            raise ValueError(f"holdout must be 0, or a whole number of at least 2, got {self.holdout}")
        if self.near is not None and not (math.isfinite(self.near) and self.near >= 0):
            raise ValueError(f"near must be finite and not negative, got {self.near}")
        if self.ndc not in (True, False, None):
            raise ValueError(f"ndc must be True, False or None, got {self.ndc!r}")
        if self.ndc and self.boxes is not None and self.boxes > 1:
            raise ValueError(f"ndc must be False or None with {self.boxes} nested boxes, got True")
        if self.missing_images not in ("error", "skip", None):
            raise ValueError(f"missing_images must be 'error' or 'skip', got {self.missing_images!r}")

    def size_of(self, size: Size) -> Size:
        """Returns the size to which images of a size are resized, both in pixels."""
        factor = max(self.downscale, 1 if self.image_size is None else max(size) / self.image_size)
        return max(1, round(size[0] / factor)), max(1, round(size[1] / factor))
