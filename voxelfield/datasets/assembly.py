"""From photographs and their cameras to a scene: its splits, its box, and whether it extends beyond that box."""

from __future__ import annotations

import filecmp
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from voxelfield.datasets.images import CUT_OUT, image_files, in_threads, read_opacity
from voxelfield.datasets.measures import transparency
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Photo, cameras_of, checked_poses, present_photos, read_split
from voxelfield.datasets.poses import OPENCV_AXES, inverted, turned_about
from voxelfield.datasets.scene import Scene, Split
from voxelfield.datasets.silhouettes import Silhouette, box_of_silhouettes
from voxelfield.grids.boxes import box_tensor, parse_box
from voxelfield.rendering.cameras import Cameras, viewing_poses
from voxelfield.rendering.lens import join_lenses
from voxelfield.rendering.rigid import moved
from voxelfield.warps.choice import box_of_cameras, box_of_points, turn_on_the_spot

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
"""Names of splits."""

# Number of silhouettes that are evaluated, and below which they may agree by chance even with wrong poses.
_SILHOUETTES = 128
_FEWEST_SILHOUETTES = 4

# Distance of the cameras from the origin, over their distance from one another, from which float32 is too coarse.
_FAR = 1000

# Opacity, of 255, below which a pixel of a photograph has no value.
_HALF = 128


def load_capture(
    folder: Path,
    source: Path,
    photos: Sequence[Photo],
    options: LoadOptions,
    listed: Mapping[str, Collection[Path]] | None = None,
    points: Tensor | None = None,
    stated_box: Tensor | None = None,
    images: Path | None = None,
) -> Scene:
    """Makes a scene of the photographs of a capture, whose format need not list splits.

    Args:
        folder: The scene's folder; its name becomes the scene's.
        source: The file that lists the photographs, for messages.
        photos: All of them. Those whose files are missing are left out, with a warning, unless the options forbid it.
            Shrunk images are used if each has one.
        options: The loading options; :func:`choose_splits` says which splits the scene has.
        listed: The paths of each split's photographs, if the format lists them. If it lists none for training, these
            are the ones in no list.
        points: As for :func:`assemble`.
        stated_box: As for :func:`assemble`.
        images: Where others are, without a pose, which a warning counts; None: in the folders of these.

    Raises:
        FileNotFoundError: Images are missing.
        ValueError: There is no such split, an image is not as it must be, or as for :func:`assemble`.
    """
    there = present_photos(folder, source, checked_poses(source, photos), options.missing_images or "skip")
    known = {path for photo in photos for path in (photo.path, photo.mask, photo.alpha, photo.depth, photo.shrunk)}
    folders = {photo.path.parent for photo in there} if images is None else {images}
    others = {path for each in folders for path in image_files(each, "*" if each == folder else "**/*")} - known
    if others:
        count, first = len({photo.path for photo in there}), min(others)
        logger.warning(
            "%s: %d of %d photographs in %s have a pose; the others are left out, the first is %s",
            *(source, count, count + len(others), images or first.parent, first.name),
        )
    # So that the order in which a file lists them is of no consequence.
    there = sorted(there, key=lambda photo: photo.path.as_posix())
    lack = [photo.path for photo in there if photo.shrunk is None]
    if 0 < len(lack) < len(there):
        logger.info("%s: all images are downscaled from full size, as %s has no reduced copy", source, lack[0])
        there = [replace(photo, shrunk=None) for photo in there]
    splits: dict[str, Sequence[Photo]] = {"train": there}
    if listed is not None:
        splits = {name: [photo for photo in there if photo.path in paths] for name, paths in listed.items()}
        rest = [photo for photo in there if not any(photo.path in paths for paths in listed.values())]
        if not listed.get("train"):
            splits["train"] = rest
        elif rest:
            logger.info("%s: %d photographs are in no split and are not used", source, len(rest))
    chosen = choose_splits(source, splits, options)
    return scene_of_photos(folder, source, there, chosen, options, points, stated_box)


def choose_splits(
    source: Path, listed: Mapping[str, Sequence[Photo]], options: LoadOptions
) -> dict[str, Sequence[Photo]]:
    """Returns the photographs of each split to load.

    Without test photographs, val replaces the test split if that is requested by name. Without either, some are held
    out of the training split. With ``holdout=0``, none are, and the test split is left out.

    Given are the photographs ``listed`` for train, val and test, of which a split may be absent or empty. Raises
    ValueError if a split has no photographs; the message lists the splits that have some, and the remedy.
    """
    splits = {name: listed.get(name, ()) for name in SPLITS}
    if not splits["test"] and not splits["val"] and splits["train"] and options.holdout > 0:
        count = len(splits["train"])
        logger.info("%s: one in %d photographs is held out for the test (data.holdout)", source, options.holdout)
        ordered = sorted(splits["train"], key=lambda photo: photo.path.as_posix())
        test = ordered[:: options.holdout]
        splits |= {"train": [photo for index, photo in enumerate(ordered) if index % options.holdout], "test": test}
        if not splits["train"] and (options.splits is None or "train" in options.splits):
            raise ValueError(
                f"{source}: there must be at least two photographs if one is held out for the test, got {count}: set "
                "data.holdout=0, or add photographs"
            )
    splits |= {name: _without_copies(source, name, splits[name], splits["train"]) for name in SPLITS[1:]}
    there = [name for name, photos in splits.items() if photos]
    if options.splits is None:
        return {name: splits[name] for name in there}
    chosen = {}
    for name in options.splits:
        if splits.get(name):
            chosen[name] = splits[name]
        elif name == "test" and splits["val"]:
            logger.info("%s: there are no test views, so the views of val replace them", source)
            chosen[name] = splits["val"]
        elif name == "test" and splits["train"]:
            if "train" in options.splits:
                logger.info("%s: there are no test views, so training views are evaluated", source)
        else:
            raise ValueError(f"splits must be among those of {source} ({', '.join(there)}), got {name}")
    return chosen


def _without_copies(source: Path, name: str, photos: Sequence[Photo], train: Sequence[Photo]) -> Sequence[Photo]:
    """Returns the photographs of a split but those whose files equal training views of their time, with a warning."""

    def key(photo: Photo) -> tuple[int, float | None]:
        return photo.path.stat().st_size if photo.path.is_file() else -1, photo.time

    by_key: dict[tuple[int, float | None], list[Path]] = {}
    for photo in train if photos else ():
        by_key.setdefault(key(photo), []).append(photo.path)
    copies: dict[Photo, Path] = {}
    for photo in photos:
        paths = by_key.get(key(photo), ()) if photo.path.is_file() else ()
        same = next((path for path in paths if filecmp.cmp(path, photo.path, shallow=False)), None)
        copies |= {} if same is None else {photo: same}
    others = [photo for photo in photos if photo not in copies]
    for first, path in list(copies.items())[:1]:
        done = "they are left out" if others else "they stay, as there are no others"
        logger.warning(
            "%s: %d of %d %s views are byte for byte training views, the first %s like %s: %s",
            *(source, len(copies), len(photos), name, first.path.name, path.name, done),
        )
    return others or photos


def scene_of_photos(
    folder: Path,
    source: Path,
    photos: Sequence[Photo],
    chosen: Mapping[str, Sequence[Photo]],
    options: LoadOptions,
    points: Tensor | None = None,
    stated_box: Tensor | None = None,
) -> Scene:
    """Makes a scene, named like its folder, of the photographs ``chosen`` for each split; see :func:`assemble`."""
    origin = _origin(source, photos) if options.origin is None else tuple(options.origin)
    if any(origin):
        offset = torch.tensor(origin, dtype=torch.float64)
        if options.aabb is not None and options.origin is None:
            parse_box(options.aabb)
            options = replace(options, aabb=torch.as_tensor(options.aabb, dtype=torch.float64) - offset)
        points, stated_box = (None if each is None else each - offset for each in (points, stated_box))
        photos, *some = (
            [replace(x, c2w=moved(x.c2w, origin, -1)) for x in group] for group in (photos, *chosen.values())
        )
        chosen = dict(zip(chosen, some, strict=True))
    splits = {name: read_split(name, each, options) for name, each in chosen.items()}
    if not any(photo.mask is not None or photo.alpha is not None for photo in photos):
        for masks in sorted(path for path in folder.iterdir() if "mask" in path.name.lower()):
            if masks.is_dir():
                logger.warning("%s: masks in this folder are not used, because %s names none of them", masks, source)
    poses = viewing_poses(torch.stack([photo.c2w for photo in photos]), join_lenses([photo.lens for photo in photos]))
    scene = assemble(folder.resolve().name, source, splits, poses, options, points, stated_box, photos)
    scene = replace(scene, origin=origin)
    # Sizes of images that are not loaded must be read from their files.
    return scene if scene.bounded else replace(scene, all_cameras=cameras_of(photos, options))


def _origin(source: Path, photos: Sequence[Photo]) -> tuple[float, ...]:
    """Returns a round position among cameras that are far from the origin, and the origin of others."""
    positions = torch.stack([photo.c2w[:3, 3] for photo in photos])
    middle = positions.median(dim=0).values
    reach = float((positions - middle).norm(dim=-1).median()) or 1.0
    step = 2.0 ** math.ceil(math.log2(reach))
    if float(middle.norm()) <= _FAR * reach:
        return 0.0, 0.0, 0.0
    origin = tuple(((middle / step).round() * step + 0.0).tolist())
    logger.info("%s: the cameras are far from the origin, so positions are relative to %s", source, origin)
    return origin


def assemble(
    name: str,
    source: Path,
    splits: Mapping[str, Split],
    poses: Tensor,
    options: LoadOptions,
    points: Tensor | None = None,
    stated_box: Tensor | None = None,
    photos: Sequence[Photo] = (),
) -> Scene:
    """Makes a scene of loaded splits and determines its box.

    Images of which at least a tenth is transparent show an object, whose box follows from its silhouettes
    (:func:`voxelfield.datasets.silhouettes.box_of_silhouettes`). All others are photographs of a place that extends
    beyond any estimated box, and their transparent pixels are masked. A box in the options takes precedence and bounds
    the scene.

    Args:
        name: The scene's name.
        source: The file that lists the photographs, for messages.
        splits: The loaded splits by name.
        poses: (N, 4, 4) where all views look, whether their split is loaded or not.
        options: The user's box, if any, and whether lenses distort.
        points: (M, 3) points from structure from motion, or points that fill the visible space, world units.
        stated_box: The box (2, 3) around the subject that the format states, if any.
        photos: The photographs of the splits; none if the images are in no file.

    Raises:
        ValueError: Silhouettes only agree if the poses have another convention, a photograph has no opaque pixels that
            count, or the box is not one.
    """
    cut_out = _shows_object(source, splits)
    if not cut_out:
        splits = {name: _without_transparency(split) for name, split in splits.items()}
    aabb, estimated = options.aabb if options.aabb is not None else stated_box, False
    if aabb is None and cut_out:
        aabb = _box_of_object(source, splits, photos, options)
    elif aabb is None:
        aabb, estimated = _box_of_place(source, poses, points), True
    box, bounded = box_tensor(parse_box(aabb), torch.device("cpu")), cut_out or options.aabb is not None
    return Scene(name, box, dict(splits), bounded, estimated, points, poses)


def _shows_object(source: Path, splits: Mapping[str, Split]) -> bool:
    """Returns whether images show an object whose background is transparent; the training images if they are loaded."""
    decisive = [splits["train"]] if "train" in splits else list(splits.values())
    shares = [share for split in decisive for share in transparency(split)]
    if not any(shares):
        return False
    mean = sum(shares) / len(shares)
    if mean >= CUT_OUT:
        logger.info("%.0f %% of all pixels are transparent: the scene is an object that ends at its box", 100 * mean)
        return True
    some = sum(share > 0 for share in shares)
    logger.warning(
        "%s: %.2g %% of all pixels are transparent, in %d of %d images: they count as pixels without a value, because "
        "images of an object without its background have at least %.0f %%",
        *(source, 100 * mean, some, len(shares), 100 * CUT_OUT),
    )
    return False


def _without_transparency(split: Split) -> Split:
    """Returns a split whose transparent pixels are masked; all others become opaque, in the memory of its images."""
    alpha = split.images[..., 3]
    opaque = alpha >= _HALF
    alpha.fill_(255)
    if all(split.all_gather([bool(opaque.all())])):
        return split
    masks = opaque if split.masks is None else opaque & split.masks
    sizes = split.cameras.all_sizes().tolist()
    pairs = zip(split.local_indices, masks, strict=True)
    bare = [index for index, mask in pairs if not bool(mask[: sizes[index][1], : sizes[index][0]].any())]
    for index in split.all_gather(bare):
        raise ValueError(
            f"{split.source_of(index)}: must have opaque pixels that are not masked, got none: leave it out"
        )
    changed = replace(split, masks=masks)
    ignored, by_masks = (sum(each.masked().values()) for each in (changed, split))
    return replace(changed, transparent=ignored - by_masks)


def _box_of_object(source: Path, splits: Mapping[str, Split], photos: Sequence[Photo], options: LoadOptions) -> Tensor:
    """Returns the box (2, 3) of the object that images with a transparent background show."""
    # All runs load the training images.
    split = splits["train"] if "train" in splits else next(iter(splits.values()))
    numbers = torch.linspace(0, len(split) - 1, min(len(split), _SILHOUETTES)).long().tolist()
    found, cameras = _silhouettes(split, numbers, photos, options)
    box = box_of_silhouettes(found, cameras)
    if box is not None:
        return box
    if len(found) >= _FEWEST_SILHOUETTES and 2 * sum(silhouette.whole for silhouette in found) > len(found):
        axes = photos[0].wrong_axes if photos else OPENCV_AXES
        mistake = inverted(cameras.c2w, axes != OPENCV_AXES)
        turned = replace(cameras, c2w=turned_about(cameras.c2w))
        if mistake is None and box_of_silhouettes(found, turned) is not None:
            mistake = axes
        if mistake is not None:
            raise ValueError(f"{source}: silhouettes must agree on where the object is, got none that do: {mistake}")
    logger.warning(
        "%s: the silhouettes do not tell where the object is, so its box is that of the cameras: check the poses and "
        "the alpha channels, or set scene.aabb",
        source,
    )
    return box_of_cameras(cameras.viewing_poses())


def _silhouettes(
    split: Split, numbers: Sequence[int], photos: Sequence[Photo], options: LoadOptions
) -> tuple[list[Silhouette], Cameras]:
    """Returns the silhouettes of some images of a split, with their cameras.

    They have the size of the files, so that the box does not depend on the size at which images are loaded.
    """
    by_path = {photo.path: photo for photo in photos}
    chosen = [by_path[(split.paths or ())[number]] for number in numbers] if by_path else []
    cameras = cameras_of(chosen, options) if chosen else split.cameras[numbers]
    own = [(index, number) for index, number in enumerate(numbers) if number in split.local_indices]
    if all(split.cameras.size(number) == cameras.size(index) for index, number in enumerate(numbers)):
        local = [Silhouette.of(split.image(number)[..., 3]) for _, number in own]
    else:

        def read(index: int) -> Silhouette:
            return Silhouette.of(torch.from_numpy(read_opacity(chosen[index].path, chosen[index].alpha)))

        local = in_threads(read, [index for index, _ in own], "looking at images")
    return split.all_gather(local), cameras


def _box_of_place(source: Path, c2w: Tensor, points: Tensor | None) -> Tensor:
    if points is not None and len(points) > 0 and not bool((points == points[0]).all()):
        return box_of_points(points)
    if turn_on_the_spot(c2w):
        logger.warning(
            "%s: the cameras turn on the spot, so the photographs show directions and no distances: images from there "
            "may be right, depths and meshes are not; take photographs from several places",
            source,
        )
    return box_of_cameras(c2w)
