"""Choice of the frame for the grid of an unbounded capture."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from voxelfield.datasets.bounds import nested_boxes_of_cameras
from voxelfield.datasets.forward import NotForwardError, ndc_box_of_cameras
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, cameras_of
from voxelfield.grids.boxes import parse_box
from voxelfield.grids.ndc_box import NdcBox
from voxelfield.grids.nested_boxes import NestedBoxes

logger = logging.getLogger(__name__)

# How many times as wide as one image all images together may be at the near plane for normalised device coordinates to
# be chosen. Where cameras stand farther apart, much of the grid is seen by few of them. At 2.3 times, nested boxes were
# as good; at 1.4 times, these coordinates were better (docs/experiments.md).
_WIDEST_WINDOW = 2.0


def choose_frame(photos: Sequence[Photo], points: Tensor | None, options: LoadOptions) -> NestedBoxes | NdcBox:
    """Returns normalised device coordinates for cameras that face the same way, otherwise nested boxes.

    Args:
        photos: All photographs, at least one; the first image file is there.
        points: (M, 3) points that structure from motion found, or that fill what is seen, world units.
        options: The user's settings for the frame.

    Raises:
        ValueError: ``options.ndc`` is True, but the cameras do not all face the same way, or neither points nor
            ``options.near`` tell where the near plane is, or ``options.aabb`` is not beyond it.
    """
    c2w = torch.stack([photo.c2w for photo in photos])
    decided = options.boxes is not None or options.aabb is not None or points is None or len(points) == 0
    if options.ndc or (options.ndc is None and not decided):
        try:
            widest = math.inf if options.ndc else _WIDEST_WINDOW
            frame = ndc_box_of_cameras(c2w, cameras_of(photos, options), points, options.near, widest)
        except NotForwardError as error:
            if options.ndc:
                raise ValueError(f"ndc must be False or None for this capture: {error}") from error
            logger.info("the grid lies in nested boxes, not in normalised device coordinates: %s", error)
        else:
            logger.info(
                "all cameras face the same way: the grid lies in normalised device coordinates, with the near plane at "
                "a depth of %.4g (scene.ndc=false: nested boxes)",
                frame.near,
            )
            return frame if options.aabb is None else replace(frame, aabb=parse_box(options.aabb))
    boxes = nested_boxes_of_cameras(c2w, points)
    if options.aabb is not None:
        boxes = replace(boxes, aabb=parse_box(options.aabb))
    boxes = replace(boxes, count=options.boxes or boxes.count)
    return boxes if options.near is None else replace(boxes, near=options.near)
