"""From the loaded images to a scene: the choice of its box, and of a warp for the grid of one without end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from voxelfield.datasets.bounds import box_of_cameras, box_of_points, nested_boxes_of_cameras
from voxelfield.datasets.forward import NotForwardError, ndc_box_of_cameras
from voxelfield.datasets.images import from_opacity
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, cameras_of
from voxelfield.datasets.poses import OPENCV_AXES, inverted, turned_about
from voxelfield.datasets.scene import Scene, Split
from voxelfield.datasets.silhouettes import Silhouette, box_of_silhouettes
from voxelfield.datasets.transparency import shows_object, without_transparency
from voxelfield.grids.boxes import box_tensor, parse_box
from voxelfield.rendering.cameras import Cameras
from voxelfield.warps.ndc_box import NdcBox
from voxelfield.warps.nested_boxes import NestedBoxes

logger = logging.getLogger(__name__)

# How many times as wide as one image all images together may be at the near plane for normalised device coordinates to
# be chosen. Where cameras stand farther apart, much of the grid is seen by few of them. At 2.3 times, nested boxes were
# as good; at 1.4 times, these coordinates were better (docs/experiments.md).
_WIDEST_WINDOW = 2.0


# Number of silhouettes that are looked at, and below which they may agree by chance, whatever the poses are.
_SILHOUETTES = 128
_FEWEST_SILHOUETTES = 4


def make_scene(
    folder: Path,
    source: Path,
    photos: Sequence[Photo],
    splits: Mapping[str, Split],
    options: LoadOptions,
    points: Tensor | None = None,
    stated_box: Callable[[], Tensor] | None = None,
    visible_box: Callable[[], Tensor] | None = None,
) -> Scene:
    """Makes a scene of images that were read from files, as :func:`assemble` does of any.

    Args:
        folder: The scene's folder; its name becomes the scene's.
        source: The file that lists the photographs, for messages.
        photos: All photographs of the scene, whether their split is loaded or not; the image files are there.
        splits: As for :func:`assemble`.
        options: As for :func:`assemble`.
        points: As for :func:`assemble`.
        stated_box: As for :func:`assemble`.
        visible_box: As for :func:`assemble`.

    Raises:
        ValueError: As for :func:`assemble`.
    """
    _name_unused_masks(folder, source, photos)
    by_path = {photo.path: photo for photo in photos}

    def silhouettes(split: Split, numbers: Sequence[int]) -> tuple[list[Silhouette], Cameras]:
        # They count at the size of their files, whatever size is asked for.
        chosen = [by_path[(split.paths or ())[number]] for number in numbers]
        cameras = cameras_of(chosen, options)
        return _silhouettes(split, numbers, chosen, cameras), cameras

    views = Views(torch.stack([photo.c2w for photo in photos]), lambda: cameras_of(photos, options), silhouettes)
    return assemble(folder.resolve().name, source, views, splits, options, points, stated_box, visible_box)


@dataclass(frozen=True)
class Views:
    """All views of a scene, whether their split is loaded or not.

    Attributes:
        c2w: (N, 4, 4) float64 or float32, camera to world.
        cameras: Returns the N cameras, at the size of their files if they have any.
        silhouettes: Returns the silhouettes of some images of a split, with their cameras, at that size.
    """

    c2w: Tensor
    cameras: Callable[[], Cameras]
    silhouettes: Callable[[Split, Sequence[int]], tuple[list[Silhouette], Cameras]]


def assemble(
    name: str,
    source: Path,
    views: Views,
    splits: Mapping[str, Split],
    options: LoadOptions,
    points: Tensor | None = None,
    stated_box: Callable[[], Tensor] | None = None,
    visible_box: Callable[[], Tensor] | None = None,
) -> Scene:
    """Makes a scene of loaded images, and decides where its field lies.

    Images of which at least a tenth is transparent show an object, whose box is that of its silhouettes
    (:func:`voxelfield.datasets.silhouettes.box_of_silhouettes`). All others are photographs of a place: the grid covers
    nested boxes, or normalised device coordinates, and single transparent pixels are masked.

    Args:
        name: The scene's name.
        source: What lists the photographs, for messages.
        views: All views of the scene.
        splits: The loaded splits by name.
        options: What the user has set of box and warp.
        points: (M, 3) points that structure from motion found, or that fill what is seen, world units.
        stated_box: Computes the box (2, 3) around the subject that the format states; None if it states none.
        visible_box: Computes the box (2, 3) around everything visible, for photographs with ``boxes=1``; None: it is
            that of the points, or of the cameras.

    Raises:
        ValueError: Silhouettes only agree if the poses have another convention, a photograph has no opaque pixels that
            count, or the options contradict the cameras.
    """
    cut_out = shows_object(source, splits)
    if not cut_out:
        splits = {name: without_transparency(split) for name, split in splits.items()}
    ends_at_box = (options.boxes or (1 if cut_out or options.aabb is not None else 2)) == 1
    aabb = options.aabb
    if aabb is None and stated_box is not None:
        aabb = stated_box()
    elif aabb is None and cut_out and not options.ndc:
        aabb = _box_of_object(source, views, splits)
    cpu = torch.device("cpu")
    if options.ndc or not ends_at_box:
        warp = choose_warp(views, points, replace(options, aabb=aabb))
        return Scene(name, box_tensor(warp.aabb, cpu), dict(splits), warp)
    if aabb is None:
        aabb = _box_of_place(views.c2w, points) if visible_box is None else visible_box()
    return Scene(name, box_tensor(parse_box(aabb), cpu), dict(splits))


def _name_unused_masks(folder: Path, source: Path, photos: Sequence[Photo]) -> None:
    """Warns of a folder of masks that no photograph has."""
    if any(photo.mask is not None or photo.alpha is not None for photo in photos):
        return
    for masks in (folder / "masks", folder / "mask"):
        if masks.is_dir():
            logger.warning("%s: masks in this folder are not used, because %s names none of them", masks, source)


def _box_of_object(source: Path, views: Views, splits: Mapping[str, Split]) -> Tensor:
    """Returns the box (2, 3) of the object that images with a transparent background show.

    Raises:
        ValueError: The silhouettes agree only if the poses have another convention.
    """
    # All runs load the training images.
    split = splits["train"] if "train" in splits else next(iter(splits.values()))
    numbers = torch.linspace(0, len(split) - 1, min(len(split), _SILHOUETTES)).long().tolist()
    silhouettes, cameras = views.silhouettes(split, numbers)
    box = box_of_silhouettes(silhouettes, cameras)
    if box is not None:
        return box
    whole = sum(silhouette.whole for silhouette in silhouettes)
    if len(silhouettes) >= _FEWEST_SILHOUETTES and 2 * whole > len(silhouettes):
        mistake = inverted(cameras.c2w)
        turned = replace(cameras, c2w=turned_about(cameras.c2w))
        if mistake is None and box_of_silhouettes(silhouettes, turned) is not None:
            mistake = OPENCV_AXES
        if mistake is not None:
            raise ValueError(f"{source}: silhouettes must agree on where the object is, got none that do: {mistake}")
    logger.warning(
        "%s: the silhouettes do not tell where the object is, so its box is that of the cameras: check the poses and "
        "the alpha channels, or set scene.aabb",
        source,
    )
    return box_of_cameras(cameras.c2w)


def _silhouettes(split: Split, numbers: Sequence[int], photos: Sequence[Photo], cameras: Cameras) -> list[Silhouette]:
    """Returns the silhouettes of some images of a split at the size of their files.

    Args:
        split: The split.
        numbers: N indices of images.
        photos: Their N photographs.
        cameras: Their N cameras at the size of the files.
    """
    if all(split.cameras.size(number) == cameras.size(index) for index, number in enumerate(numbers)):
        return [Silhouette.of(split.image(number)[..., 3]) for number in numbers]
    return from_opacity(
        [photo.path for photo in photos],
        [photo.alpha for photo in photos],
        lambda alpha: Silhouette.of(torch.from_numpy(alpha)),
    )


def _box_of_place(c2w: Tensor, points: Tensor | None) -> Tensor:
    return box_of_points(points) if points is not None and len(points) > 0 else box_of_cameras(c2w)


def choose_warp(views: Views, points: Tensor | None, options: LoadOptions) -> NestedBoxes | NdcBox:
    """Returns normalised device coordinates for cameras that face the same way, otherwise nested boxes.

    Args:
        views: All views, at least one.
        points: (M, 3) points that structure from motion found, or that fill what is seen, world units.
        options: The user's settings for the warp.

    Raises:
        ValueError: ``options.ndc`` is True, but the cameras do not all face the same way, or neither points nor
            ``options.near`` tell where the near plane is, or ``options.aabb`` is not beyond it.
    """
    c2w = views.c2w
    decided = options.boxes is not None or options.aabb is not None or points is None or len(points) == 0
    if options.ndc or (options.ndc is None and not decided):
        try:
            widest = math.inf if options.ndc else _WIDEST_WINDOW
            warp = ndc_box_of_cameras(c2w, views.cameras(), points, options.near, widest)
        except NotForwardError as error:
            if options.ndc:
                raise ValueError(f"ndc must be False or None for this capture: {error}") from error
            logger.info("the grid lies in nested boxes, not in normalised device coordinates: %s", error)
        else:
            logger.info(
                "all cameras face the same way: the grid lies in normalised device coordinates, with the near plane at "
                "a depth of %.4g (scene.ndc=false: nested boxes)",
                warp.near,
            )
            return warp if options.aabb is None else replace(warp, aabb=parse_box(options.aabb))
    boxes = nested_boxes_of_cameras(c2w, points)
    if options.aabb is not None:
        boxes = replace(boxes, aabb=parse_box(options.aabb))
    boxes = replace(boxes, count=options.boxes or boxes.count)
    return boxes if options.near is None else replace(boxes, near=options.near)
