"""``voxelfield render``: draws a trained field along a path of cameras, as a video or as images."""

from __future__ import annotations

import argparse
import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import voxelfield
from voxelfield.cli.errors import in_one_line
from voxelfield.cli.scenes import add_run_arguments, load_scene_of
from voxelfield.datasets.camera_path import LARGEST_FPS, LARGEST_SIDE, read_camera_path
from voxelfield.media.frame_folder import FrameFolder, farthest
from voxelfield.media.video import CODECS, VideoFormat, import_av, video_format, write_video
from voxelfield.rendering.cameras import Cameras, orbit
from voxelfield.rendering.paths import at_size, interpolate, spiral
from voxelfield.rendering.pixels import MIN_VISIBLE_OPACITY
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import MAX_RAYS_ACROSS, FieldRenderer
from voxelfield.rendering.view_pictures import PICTURES, depth_range, picture
from voxelfield.training.state.fingerprint import fingerprint_of_weights
from voxelfield.training.state.run_directory import VIDEO
from voxelfield.training.state.run_paths import depth_bounds, seen_point, usual_path
from voxelfield.training.trained_model import TrainedModel
from voxelfield.transfers import AHEAD

logger = logging.getLogger(__name__)

PATHS = ("orbit", "spiral", "interpolate")
FPS = 30.0
MAX_FRAMES = 1_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and renders; returns the exit status."""
    options = parser().parse_args(arguments)
    options.out = options.out or Path(VIDEO if options.path is None else f"{Path(options.path).stem}.mp4")
    return in_one_line(lambda: render(options))


def parser() -> argparse.ArgumentParser:
    """Returns what parses the command line."""
    parser = argparse.ArgumentParser(
        prog="voxelfield render",
        description="Render a trained field along a camera path, as a video or as numbered images.",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--path",
        metavar="PATH",
        help="orbit: a circle at the training cameras' mean distance and height; spiral: for cameras that face the "
        "same way, such as LLFF's; interpolate: through ten of the training cameras; or a camera path (*.json) saved "
        "by nerfstudio's or voxelfield's viewer (default: spiral if all photographs face the same way, else orbit)",
    )
    parser.add_argument("--split", help="split whose cameras determine orbit, spiral or interpolate (default: train)")
    parser.add_argument("--frames", type=int, help="number of frames (default: 120, or that of the camera path)")
    parser.add_argument("--range", metavar="A:B", help="render only frames A to B - 1 of these, into a folder")
    parser.add_argument("--fps", type=float, help="frames per second (default: 30, or that of the camera path)")
    parser.add_argument("--size", metavar="WxH", help="in pixels (default: that of the training images or the path)")
    parser.add_argument(
        "--supersampling", type=int, metavar="N", help="cast N x N rays per pixel (default: as in the run's evaluation)"
    )
    parser.add_argument(
        "--background", metavar="COLOUR", help="white, black or three numbers R,G,B in [0, 1] (default: the run's)"
    )
    parser.add_argument("--show", choices=PICTURES, default="rgb", help="quantity that a video shows (default: rgb)")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"a video (mp4, mkv, webm or mov) or a folder (default: PATH.mp4, {VIDEO} without --path). A folder "
        "receives numbered images, and the same command continues where it stopped",
    )
    parser.add_argument("--codec", choices=CODECS, help="codec of the video (default: by its suffix)")
    parser.add_argument(
        "--crf",
        type=int,
        metavar="N",
        help="quality of the video: higher values give smaller, worse files (default: 16 to 24)",
    )
    parser.add_argument(
        "--pixels", metavar="LAYOUT", help="FFmpeg's pixel format of the video, such as yuv444p (default: yuv420p)"
    )
    parser.add_argument("--format", choices=("png", "exr"), default="png", help="format of images (default: png)")
    parser.add_argument(
        "--depth", action="store_true", help="write a 16-bit depth map beside each PNG; EXR always has one"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete the frames of another run, path or size in the folder first"
    )
    return parser


def render(options: argparse.Namespace) -> None:
    """Renders as the command line asks.

    Raises:
        ValueError: An option makes no sense; the message names it.
        OSError: A file is not there or cannot be written.
        MissingPackageError: A package is not installed.
    """
    is_video = options.out.suffix != ""
    _check(options, is_video)
    run = voxelfield.load(options.run, options.device)
    cameras, fps = path_of(run, options)
    renderer = run.renderer(
        supersampling=options.supersampling, background=_background(options.background, run.field.aabb.device)
    )
    if is_video:
        views = _checked(run.render_path(cameras, renderer), len(cameras), delay=AHEAD)
        depths = depth_range(renderer, cameras) if options.show == "depth" else (0.5, 1.0)
        shown = (picture(view, options.show, depths) for view in views)
        write_video(options.out, shown, fps, _video_format(options))
        logger.info("wrote %d frames of %dx%d to %s", len(cameras), cameras.width, cameras.height, options.out)
    else:
        _write_frames(run, renderer, cameras, options)


def path_of(run: TrainedModel, options: argparse.Namespace) -> tuple[Cameras, float]:
    """Returns the stations of the requested path, and the frames per second."""
    if options.path is None or options.path in PATHS:
        split = options.split or "train"
        around = load_scene_of(run, options, (split,)).split(split).cameras
        if run.cameras is not None:
            around = run.cameras.follow(around)
        frames = 120 if options.frames is None else options.frames
        if options.path is None:
            cameras = usual_path(run, around, frames)
        elif options.path == "orbit":
            cameras = orbit(around, run.field.centre, frames)
        elif options.path == "spiral":
            target = seen_point(run, around)
            if target is None:
                raise ValueError(
                    "--path must be orbit or interpolate, because the middle camera sees no subject to circle"
                )
            cameras = spiral(around, target, frames)
        else:
            cameras = interpolate(around, frames)
        fps = FPS
    else:
        known = read_camera_path(Path(options.path))
        cameras, fps = known.cameras, known.fps
    if options.size is not None:
        cameras = at_size(cameras, *_size(options.size))
    return cameras, fps if options.fps is None else options.fps


def _write_frames(run: TrainedModel, renderer: FieldRenderer, cameras: Cameras, options: argparse.Namespace) -> None:
    first, end = _range(options.range, len(cameras))
    background = options.background or run.trainer.evaluation_background
    supersampling = options.supersampling or run.trainer.evaluation.supersampling
    source = {"run": options.run.resolve().name, "steps": run.steps}
    source |= {"weights": fingerprint_of_weights(run.field, run.occupancy)}
    source |= {"background": background, "supersampling": supersampling}
    far = farthest(cameras, depth_bounds(run.field))
    with FrameFolder(
        options.out, cameras, options.format, options.depth, far, source, overwrite=options.overwrite
    ) as folder:
        missing = [index for index in range(first, end) if not folder.has(index)]
        views = run.render_path(cameras[missing], renderer)
        for index, view in zip(missing, _checked(views, len(missing)), strict=True):
            folder.save(index, view)
    logger.info(
        "wrote %d frames of %dx%d to %s, which already had %d",
        *(len(missing), cameras.width, cameras.height, options.out, end - first - len(missing)),
    )
    if options.depth:
        logger.info("one step of a depth PNG is %.6g world units; 0 means that nothing was hit", folder.depth_unit)


def _checked(views: Iterator[View], total: int, *, delay: int = 0) -> Iterator[View]:
    """Yields views under a progress bar; warns in the end if none of them shows anything.

    Args:
        views: The views.
        total: Number of views.
        delay: Number of views that may be queued on the device before one is checked.

    Raises:
        FloatingPointError: A view contains NaN or infinity. The last ``delay`` views may have been yielded.
    """
    most: Tensor | None = None
    unchecked: deque[Tensor] = deque()
    checked = 0
    for view in tqdm(views, total=total, unit="frame", disable=None, leave=False):
        # Stays on the device: reading it would synchronise with the rendering of this view.
        highest = view.opacity.max()
        most = highest if most is None else torch.maximum(most, highest)
        unchecked.append(view.rgb.isfinite().all())
        while len(unchecked) > delay:
            _check_finite(unchecked.popleft(), checked, total)
            checked += 1
        yield view
    for index, finite in enumerate(unchecked, checked):
        _check_finite(finite, index, total)
    if most is not None and float(most) < MIN_VISIBLE_OPACITY:
        logger.warning(
            "all %d frames show nothing but the background: the field is empty where the cameras look", total
        )


def _check_finite(finite: Tensor, index: int, total: int) -> None:
    if not bool(finite):
        raise FloatingPointError(
            f"rendered frames must be finite, got NaN or infinity in frame {index + 1} of {total}: the weights of RUN "
            "are damaged, or its training diverged"
        )


def _check(options: argparse.Namespace, is_video: bool) -> None:
    """Refuses invalid options before anything is loaded."""
    for name, most in (("frames", MAX_FRAMES), ("supersampling", MAX_RAYS_ACROSS)):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"--{name} must lie in [1, {most}], got {value}")
    if options.fps is not None and not 0 < options.fps <= LARGEST_FPS:
        raise ValueError(f"--fps must lie in (0, {LARGEST_FPS:g}], got {options.fps:g}")
    if options.size is not None:
        _size(options.size)
    _background(options.background, torch.device("cpu"))
    if options.path is not None and options.path not in PATHS:
        path = Path(options.path)
        if path.suffix.lower() != ".json":
            raise ValueError(f"--path must be {', '.join(PATHS)} or a camera path *.json, got {options.path}")
        for name, what in (("frames", "which lists its frames"), ("split", "which has its own cameras")):
            value = getattr(options, name)
            if value is not None:
                raise ValueError(f"--{name} must be left out with {path}, {what}, got {value}")
        read_camera_path(path)
    if is_video:
        import_av("write a video")
        _video_format(options)
        for_images = {"range": options.range, "depth": options.depth, "overwrite": options.overwrite}
        given = [name for name, value in for_images.items() if value]
        if given or options.format != "png":
            raise ValueError(f"--{(given or ['format'])[0]} is for images: --out must be a folder, got {options.out}")
    else:
        for_videos = {name: getattr(options, name) for name in ("codec", "crf", "pixels")}
        for_videos["show"] = None if options.show == "rgb" else options.show
        unused = [name for name, value in for_videos.items() if value is not None]
        if unused:
            raise ValueError(f"--{unused[0]} is for videos: --out must be a video, got {options.out}")
        if options.depth and options.format == "exr":
            raise ValueError("--depth is for PNGs: EXR files contain the depth as channel Z")
        if options.range is not None:
            _range(options.range, None)


def _video_format(options: argparse.Namespace) -> VideoFormat:
    return video_format("--out", options.out, options.codec, crf=options.crf, pixels=options.pixels)


def _size(text: str) -> tuple[int, int]:
    """Returns width and height."""
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise ValueError(f"--size must be WIDTHxHEIGHT in pixels, such as 1920x1080, got {text}")
    width, height = int(match[1]), int(match[2])
    if max(width, height) > LARGEST_SIDE:
        raise ValueError(f"--size must be at most {LARGEST_SIDE}x{LARGEST_SIDE} pixels, got {text}")
    return width, height


def _range(text: str | None, frames: int | None) -> tuple[int, int]:
    """Returns the first frame, and the one after the last; all of ``frames`` if no range is given."""
    if text is None:
        return 0, frames or 0
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]) or (frames is not None and int(match[2]) > frames):
        last = "" if frames is None else f" up to {frames}"
        raise ValueError(f"--range must be A:B with A below B{last}, such as 0:60, got {text}")
    return int(match[1]), int(match[2])


def _background(text: str | None, device: torch.device) -> Tensor | None:
    """Returns the colour (3,), or None if none is requested."""
    if text is None:
        return None
    parts = {"white": ["1"] * 3, "black": ["0"] * 3}.get(text, text.split(","))
    try:
        colour = [float(part) for part in parts]
    except ValueError:
        colour = []
    if len(colour) != 3 or not all(0 <= value <= 1 for value in colour):
        raise ValueError(f"--background must be white, black or three numbers R,G,B in [0, 1], got {text}")
    return torch.tensor(colour, device=device)
