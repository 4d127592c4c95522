"""The verb ``render``: a trained field along a camera path, as a video or as numbered images."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

import voxelfield
from voxelfield.cli.trained import add_run_arguments, number, scene_options
from voxelfield.config import Range
from voxelfield.datasets.camera_path import read_camera_path
from voxelfield.devices import AHEAD
from voxelfield.media.frame_folder import FrameFolder, farthest
from voxelfield.media.video import FPS_RANGE, LARGEST_SIDE, check_video, write_video
from voxelfield.progress import size_in_words, tracked
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.paths import PATHS, at_size, path_named
from voxelfield.rendering.pixels import MIN_VISIBLE_OPACITY
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import MAX_RAYS_ACROSS, FieldRenderer
from voxelfield.rendering.view_pictures import PICTURES, depth_bounds, depth_range, picture
from voxelfield.run_directory import VIDEO
from voxelfield.trained.trained_model import TrainedModel

logger = logging.getLogger(__name__)

FPS = 30.0
MAX_FRAMES = 1_000_000

# Options of numbered images.
_OF_IMAGES = ("range", "format", "depth", "overwrite")


def size(text: str) -> tuple[int, int]:
    """Parses a width and a height in pixels, such as ``1920x1080``."""
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be WIDTHxHEIGHT in pixels, such as 1920x1080, got {text}")
    width, height = int(match[1]), int(match[2])
    if max(width, height) > LARGEST_SIDE:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST_SIDE}x{LARGEST_SIDE} pixels, got {text}")
    return width, height


def _range(text: str) -> tuple[int, int]:
    """Parses the index of the first frame, and of the one after the last."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"must be A:B with A below B, such as 0:60, got {text}")
    return int(match[1]), int(match[2])


def _color(text: str) -> list[float]:
    parts = {"white": "1,1,1", "black": "0,0,0"}.get(text, text).split(",")
    with contextlib.suppress(ValueError):
        color = [float(part) for part in parts]
        if len(color) == 3 and all(0 <= value <= 1 for value in color):
            return color
    raise argparse.ArgumentTypeError(f"must be white, black or three numbers R,G,B in [0, 1], got {text}")


def _path(text: str) -> str | Path:
    """Parses the name of a path, or the file of a camera path."""
    if text in PATHS:
        return text
    if Path(text).suffix.lower() != ".json":
        raise argparse.ArgumentTypeError(f"must be {', '.join(PATHS)} or a camera path *.json, got {text}")
    return Path(text)


def add_render_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add_run_arguments(parser)
    add(
        "--path",
        type=_path,
        metavar="PATH",
        help="orbit: a circle at the training cameras' mean distance and height; spiral: for cameras that face the "
        "same way, such as LLFF's; interpolate: through ten of the training cameras; or a camera path (*.json) saved "
        "by nerfstudio's or voxelfield's viewer (default: spiral if all photographs face the same way, else orbit)",
    )
    time = "time of all frames, for a field that depends on it (default: from the first to the last, or the path's)"
    add("--time", type=number(float, Range(-1e30, 1e30)), help=time)
    add("--split", help="split whose cameras determine orbit, spiral or interpolate (default: train)")
    add("--frames", type=number(int, Range(1, MAX_FRAMES)), help="number of frames (default: 120, or that of the path)")
    add("--range", type=_range, metavar="A:B", help="render only frames A to B - 1 of these, into a folder")
    fps = "frames per second (default: 30, or that of the camera path)"
    add("--fps", type=number(float, Range(*FPS_RANGE)), help=fps)
    add("--size", type=size, metavar="WxH", help="in pixels (default: that of the training images or the path)")
    rays = "cast N x N rays per pixel (default: as in the run's evaluation)"
    add("--supersampling", type=number(int, Range(1, MAX_RAYS_ACROSS)), metavar="N", help=rays)
    colour = "white, black or three numbers R,G,B in [0, 1] (default: the run's)"
    add("--background", type=_color, metavar="COLOUR", help=colour)
    add("--show", choices=PICTURES, help="quantity that a video shows (default: rgb)")
    add(
        "--out",
        type=Path,
        help=f"a video *.mp4, or a folder (default: PATH.mp4, {VIDEO} without --path). A folder "
        "receives numbered images, and the same command continues where it stopped",
    )
    add("--format", choices=("png", "exr"), help="format of images (default: png)")
    add("--depth", action="store_true", help="write 16-bit depths along the rays beside each PNG; EXR always has them")
    add("--overwrite", action="store_true", help="delete the frames of another run, path or size in the folder first")


def run_render(options: argparse.Namespace) -> None:
    """Render a trained field along a camera path, as a video or as numbered images."""
    out = options.out or Path(f"{options.path.stem}.mp4" if isinstance(options.path, Path) else VIDEO)
    is_video = out.suffix != ""
    # Refused before anything is loaded.
    if isinstance(options.path, Path):
        _exclude(options, ("frames", "split"), f"must be left out with {options.path}, which has its own cameras")
        read_camera_path(options.path)
    if is_video:
        check_video("--out", out)
        _exclude(options, _OF_IMAGES, f"is for images: --out must be a folder, got {out}")
    else:
        _exclude(options, ("show",), f"is for videos: --out must be a video, got {out}")
        if options.depth and options.format == "exr":
            raise ValueError("--depth is for PNGs: EXR files contain the depth as channel Z")
    trained = voxelfield.load(options.run, options.device)
    cameras, fps = path_of(trained, options)
    background = options.background
    if background is not None:
        background = torch.tensor(background, device=trained.model.device)
    renderer = trained.renderer(supersampling=options.supersampling, background=background)
    if is_video:
        views = _checked(trained.render_path(cameras, renderer), len(cameras), delay=AHEAD)
        shown = options.show or "rgb"
        depths = depth_range(renderer, cameras) if shown == "depth" else (0.5, 1.0)
        write_video(out, (picture(view, shown, depths) for view in views), fps)
        written = (len(cameras), cameras.width, cameras.height, out, size_in_words(out))
        logger.info("wrote %d frames of %dx%d to %s (%s)", *written)
    else:
        _write_frames(trained, renderer, cameras, out, options)


def _exclude(options: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raises ValueError if one of the options is given."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:
            raise ValueError(f"--{name} {reason}")


def path_of(trained: TrainedModel, options: argparse.Namespace) -> tuple[Cameras, float]:
    """Returns the cameras of the requested path, and the frames per second."""
    if isinstance(options.path, Path):
        known = read_camera_path(options.path, trained.config.scene.origin)
        cameras, fps = known.cameras, known.fps
    else:
        split, frames, fps = options.split or "train", options.frames or 120, FPS
        around = trained.load_scene((split,), **scene_options(options)).split(split).cameras
        if trained.cameras is not None:
            around = trained.cameras.follow(around)
        scene = (trained.model.centre, trained.model.warp, trained.render)
        cameras = path_named(options.path, around, frames, *scene)
    needed = "time" in (*trained.field.extra_inputs, *trained.field.density_inputs)
    if not needed:
        _exclude(options, ("time",), "must be left out, because the field does not depend on time")
    if options.time is not None:
        cameras = cameras.with_values(time=options.time)
    elif needed and "time" not in (*cameras.values, *trained.field.optional_inputs):
        raise ValueError("--time must be given, because the field depends on it and the path has no render_time")
    if options.size is not None:
        cameras = at_size(cameras, *options.size)
    return cameras, fps if options.fps is None else options.fps


def _write_frames(
    trained: TrainedModel, renderer: FieldRenderer, cameras: Cameras, out: Path, options: argparse.Namespace
) -> None:
    first, end = options.range or (0, len(cameras))
    if end > len(cameras):
        raise ValueError(f"--range must end at or below {len(cameras)}, the number of frames, got {first}:{end}")
    kind: Literal["png", "exr"] = options.format or "png"
    source = {"run": options.run.resolve().name, "steps": trained.steps}
    source |= {"weights": _digest(trained.field, trained.occupancy)}
    usual = trained.model.background.tolist() if trained.model.environment is None else "environment"
    source |= {"background": options.background or usual}
    source |= {"supersampling": options.supersampling or trained.trainer.evaluation.supersampling}
    far = farthest(cameras, depth_bounds(trained.field.aabb, trained.model.warp))
    with FrameFolder(out, cameras, kind, options.depth, far, source, overwrite=options.overwrite) as folder:
        missing = [index for index in range(first, end) if not folder.has(index)]
        views = trained.render_path(cameras[missing], renderer)
        for index, view in zip(missing, _checked(views, len(missing)), strict=True):
            folder.save(index, view)
    kinds = f", {cameras.kinds}," if cameras.kinds else ""
    logger.info(
        "wrote %d frames of %dx%d%s to %s, which already had %d",
        *(len(missing), cameras.width, cameras.height, kinds, out, end - first - len(missing)),
    )
    if options.depth:
        logger.info("one step of a depth PNG is %.6g world units; 0 means that nothing was hit", folder.depth_unit)


def _digest(*modules: nn.Module) -> str:
    """Returns a digest (BLAKE2b) of the parameters and buffers of modules on any device.

    Floating-point values are rounded to float16, as which a GPU reads the grids that a CPU reads as float32.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in (entry for module in modules for entry in module.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)};".encode())
            rounded = value.half() if value.is_floating_point() else value
            digest.update(rounded.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checked(views: Iterator[View], total: int, *, delay: int = 0) -> Iterator[View]:
    """Yields views under a progress bar; warns in the end if none of them shows anything.

    Raises FloatingPointError if a view contains NaN or infinity. So as not to wait for the device, each view is checked
    only when ``delay`` others have been yielded after it.
    """
    visible = False
    # Left on the device: reading them would synchronise with the rendering of this view.
    unchecked: deque[tuple[int, Tensor, Tensor]] = deque()

    def check() -> bool:
        index, finite, most = unchecked.popleft()
        if not bool(finite):
            raise FloatingPointError(
                f"rendered frames must be finite, got NaN or infinity in frame {index + 1} of {total}: the weights of "
                "RUN are damaged, or its training diverged"
            )
        return float(most) >= MIN_VISIBLE_OPACITY

    for index, view in enumerate(tracked(views, "rendering frames", total)):
        unchecked.append((index, view.rgb.isfinite().all(), view.opacity.max()))
        if len(unchecked) > delay:
            visible |= check()
        yield view
    while unchecked:
        visible |= check()
    if total > 0 and not visible:
        logger.warning(
            "all %d frames show nothing but the background: the field is empty where the cameras look (a path of "
            "nerfstudio's viewer is in a normalised frame; docs/rendering.md says the way back)",
            total,
        )
