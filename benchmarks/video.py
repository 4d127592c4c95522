"""Times a video of a trained run: rendering alone, encoding alone, and both in parallel.

    python benchmarks/video.py RUN [--frames N] [--size WxH] [--device cpu|cuda] [--data-root DIR]

The video is an orbit with one ray per pixel. "rendering" keeps the frames on their device; "encoding" gets existing
frames; "both" is the procedure of ``voxelfield render``. If rendering and encoding do not slow each other down, both
together take as long as the slower one, and the last column is 100 %.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path

import _harness as harness
import torch

import voxelfield
from voxelfield.cli.render import path_of, size
from voxelfield.media.video import write_video

# A few frames are encoded repeatedly, because many would not fit in memory.
_KEPT = 16


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, measures, and prints the table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--size", type=size, default="1920x1080")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-root", type=Path)
    parser.set_defaults(path="orbit", fps=None, missing_images=None, split=None)
    options = parser.parse_args(arguments)
    run = voxelfield.load(options.run, options.device)
    cameras, fps = path_of(run, options)
    cameras = cameras.to(run.field.aabb.device)
    renderer = run.renderer(supersampling=1)

    def synchronise() -> None:
        if cameras.c2w.is_cuda:
            torch.cuda.synchronize()

    kept = [renderer.view(cameras, index).rgb for index in range(min(_KEPT, len(cameras)))]
    synchronise()
    started = time.perf_counter()
    for index in range(len(cameras)):
        renderer.view(cameras, index)
    synchronise()
    rendering = time.perf_counter() - started

    frames = [rgb.cpu() for rgb in kept]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "video.mp4")
        started = time.perf_counter()
        write_video(path, itertools.islice(itertools.cycle(frames), len(cameras)), fps)
        encoding = time.perf_counter() - started
        started = time.perf_counter()
        write_video(path, (view.rgb for view in run.render_path(cameras, renderer)), fps)
        both = time.perf_counter() - started

    where = harness.machine(cameras.c2w.device)
    print(", ".join(f"{key} {value}" for key, value in where.items() if value is not None))
    print(f"{len(cameras)} frames of {cameras.width}x{cameras.height}")
    header = ["frames a second", "rendering", "encoding", "both", "of the slower one"]
    speeds = [len(cameras) / seconds for seconds in (rendering, encoding, both)]
    share = max(rendering, encoding) / both
    print(harness.table(header, [["", *(f"{speed:.1f}" for speed in speeds), f"{100 * share:.0f}%"]]))


if __name__ == "__main__":
    main()
