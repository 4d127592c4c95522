"""The options that the loaders of all formats take, which are settings of a run too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from voxelfield.config import Count, Natural
from voxelfield.datasets.images import Size


@dataclass(kw_only=True)
class ImageOptions:
    """Which photographs are read, and how.

    Attributes:
        downscale: Images are shrunk by this factor N first, or taken from the folder ``images_N`` of a capture if that
            holds the same images.
        holdout: Every ``holdout``-th training view, sorted by path, is a test view in a scene without test or
            validation views; 0: no test views.
        missing_images: ``error`` refuses a scene that lacks a listed image, ``skip`` leaves such views out and warns;
            None: the usual choice for the format.
        invert_masks: Whether pixels are ignored where masks are white or grey, instead of black.
        soft_masks: Whether the grey values of masks are weights of pixels in training, so that only black ones, or only
            white ones with ``invert_masks``, are ignored.
        lens_distortion: Whether to apply lens distortion. Without, fisheye lenses are equidistant, and all others are
            pinholes.
    """

    downscale: Count = 1
    holdout: Natural = 8
    missing_images: Literal["error", "skip"] | None = None
    invert_masks: bool = False
    soft_masks: bool = False
    lens_distortion: bool = True


@dataclass
class LoadOptions(ImageOptions):
    """The loading options of a scene; the keyword arguments of :func:`voxelfield.load_scene`.

    Attributes:
        splits: Which of train, val and test; None: all that the scene has. Without test views, val replaces them;
            without either, some views are held out (``holdout``), or there is no test split.
        image_size: Images with a side longer than this, in pixels, are shrunk to it; None leaves them unchanged.
        aabb: (2, 3) box that contains the whole scene, world units. None: the box in ``configs/scene`` if the scene is
            given by a name in it, never for a path; otherwise as :func:`voxelfield.datasets.assembly.assemble` says.
        origin: Position in the capture that becomes the origin; ``aabb`` is then relative to it. None: the capture's
            own, or with cameras far from it, where float32 has lost digits, a round position among them.
        model: Number N of the COLMAP model ``sparse/N``, if a capture has several; None: the one with the most images.
        divided: Whether each process of a group, all of which must load the scene, reads only some of the images
            for training (:attr:`voxelfield.datasets.scene.Split.local_slice`).
        depth: Whether to read the depths that a capture has: the files that a ``transforms.json`` names, or the points
            of a COLMAP model where its images observe them (``extras`` of :class:`voxelfield.datasets.scene.Split`). A
            capture without depths is then refused.

    Raises:
        ValueError: A value is none of these.
    """

    splits: Sequence[str] | None = ("train", "test")
    image_size: int | None = None
    aabb: Tensor | Sequence[Sequence[float]] | None = None
    origin: tuple[float, ...] | None = None
    model: int | None = None
    divided: bool = False
    depth: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.splits, str):
            raise ValueError(f"splits must be a sequence of names or None, got {self.splits!r}: use [{self.splits!r}]")
        self.splits = self.splits and tuple(self.splits)
        for name, least in (("downscale", 1), ("image_size", 1), ("model", 0)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
        if self.holdout < 0 or self.holdout == 1:
            raise ValueError(f"holdout must be 0, or a whole number of at least 2, got {self.holdout}")
        if self.missing_images not in ("error", "skip", None):
            raise ValueError(f"missing_images must be 'error' or 'skip', got {self.missing_images!r}")

    def size_of(self, size: Size) -> Size:
        """Returns the size to which images of a size are resized, both in pixels."""
        factor = max(self.downscale, 1 if self.image_size is None else max(size) / self.image_size)
        return max(1, round(size[0] / factor)), max(1, round(size[1] / factor))
