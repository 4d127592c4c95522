"""The scene's folder on disk: transforms and images in the NeRF-synthetic (Blender) layout."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

from PIL import Image

from make_bricks.arrays import Array
from make_bricks.cameras import CAMERA_ANGLE_X
from make_bricks.harbour.assembly import build_harbour
from make_bricks.rendering.renderer import Renderer

logger = logging.getLogger(__name__)


@cache
def harbour_renderer(size: int, spp: int) -> Renderer:
    """Returns the renderer of the harbour, which is built once in each process."""
    return Renderer(build_harbour(), size, spp)


def render_file(job: tuple[Path, Array, int], size: int, spp: int) -> Path:
    """Renders one (path, camera, seed), saves the image and returns its path."""
    path, c2w, seed = job
    Image.fromarray(harbour_renderer(size, spp).render(c2w, seed)).save(path, optimize=True)
    return path


def write_transforms(folder: Path, split: str, cameras: Array) -> None:
    """Writes ``transforms_{split}.json`` for cameras (N, 4, 4)."""
    frames = [
        {"file_path": f"./{split}/r_{k}", "transform_matrix": c2w.round(9).tolist()} for k, c2w in enumerate(cameras)
    ]
    content = {"camera_angle_x": CAMERA_ANGLE_X, "frames": frames}
    (folder / f"transforms_{split}.json").write_text(json.dumps(content, indent=1) + "\n")


def write_dataset(folder: Path, splits: Mapping[str, Array], size: int, spp: int, processes: int) -> None:
    """Writes the transforms and the rendered images of every split.

    Args:
        folder: Where to write; created if missing.
        splits: By name, the camera-to-world matrices (N, 4, 4) of each split. The seed of a view is its position
            in all splits taken together.
        size: Side of the square images in pixels.
        spp: Samples per pixel.
        processes: Number of processes that render, of one thread each.
    """
    views = []
    for split, cameras in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        write_transforms(folder, split, cameras)
        views += [(folder / split / f"r_{k}.png", c2w) for k, c2w in enumerate(cameras)]
    jobs = [(path, c2w, seed) for seed, (path, c2w) in enumerate(views)]
    begin = time.perf_counter()
    # Mitsuba's thread pool does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        for done, path in enumerate(pool.map(partial(render_file, size=size, spp=spp), jobs), start=1):
            logger.info("%d/%d %s, %.0f s", done, len(jobs), path, time.perf_counter() - begin)
