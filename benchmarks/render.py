"""Times the rendering of a trained run's images, and measures the quality of exactly these images.

    python benchmarks/render.py RUN [--split test] [--data-root DIR] [--missing-images error|skip] [--views N]
                                [--supersampling N] [--min-weight X] [--voxels-per-step X] [--device cpu|cuda]
                                [--threads N] [--quick] [--only SUBSTRING] [--json PATH]

RUN is a run directory or a checkpoint. Every camera of the split is rendered at the full resolution of its image,
regardless of the training resolution, with ``voxelfield.FieldRenderer``: by the fastest backend for the kind of field
and, in the same run, by the general ``render_view``; ``--only`` selects one of the two by name.

- Each call renders one camera. Cameras are on the device, rays are generated within the call, and the device is
  synchronised after each frame, when the image is complete in its memory. A frame's time is that between two such
  synchronisations. "fps" is the number of frames divided by the sum of their times. As a warm-up, all frames are
  rendered once on a GPU, and the first one on a CPU.
- PSNR and SSIM are those of the timed frames, over the background of the run's evaluation; each frame is copied from
  the device after its clock has stopped. "off" is the mean absolute difference from the frames of the first row.
- Settings are those of the run's own evaluation unless given on the command line.
- The profile is from torch's profiler over at most ten of the frames, rendered once more: device time by kernel on a
  GPU, self time by operator on a CPU. The rest of a frame's time is spent on the host. If the profiler records nothing,
  there is no profile.
- ``--quick`` renders at most ten frames, spread evenly over the split, as ``--views`` does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import _harness as harness
import torch
from _run_scene import load_run_scene
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import voxelfield
from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import evenly_spaced
from voxelfield.evaluation.metrics import psnr, ssim
from voxelfield.rendering.backends import fastest_backend
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.pixels import composite_background
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.training.execution import synchronized_time

QUICK_FRAMES = 10
PROFILED_FRAMES = 10
PRINTED_STEPS = 12


def draw(
    renderer: FieldRenderer, cameras: Cameras, views: Sequence[int], device: torch.device
) -> tuple[list[float], list[Tensor]]:
    """Renders frames; returns their times in seconds, and their colours (H, W, 3) on the host."""
    seconds, frames = [], []
    for index in views:
        began = synchronized_time(device)
        view = renderer.view(cameras, index)
        seconds.append(synchronized_time(device) - began)
        frames.append(view.rgb.cpu())
    return seconds, frames


def judge(
    frames: Sequence[Tensor], split: Split, views: Sequence[int], background: Tensor, first: Sequence[Tensor]
) -> dict[str, float]:
    """Compares frames with the photographs, using the metrics of the evaluation, and with the first row's frames."""
    scores = []
    for frame, index, other in zip(frames, views, first, strict=True):
        rgb = frame.to(background.device)
        truth = composite_background(split.image(index).to(background.device), background)
        off = (rgb - other.to(background.device)).abs().mean()
        rgb, mask = rgb.clamp(0, 1), split.mask(index, rgb.device)
        shown = rgb if mask is None else torch.where(mask[..., None], rgb, truth)
        scores.append(torch.stack((psnr(rgb, truth, mask), ssim(shown, truth), off)))
    mean = torch.stack(scores).double().mean(0).tolist()
    return dict(zip(("psnr", "ssim", "off"), mean, strict=True))


def profile_steps(
    renderer: FieldRenderer, cameras: Cameras, views: Sequence[int], device: torch.device
) -> list[dict[str, Any]]:
    """Returns the time that frames spend by kernel (on a CPU: by operator), in descending order."""
    on_gpu = device.type == "cuda"
    views = [views[i] for i in evenly_spaced(PROFILED_FRAMES, len(views))]
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        for index in views:
            renderer.view(cameras, index)
            synchronized_time(device)
    steps = []
    for event in profiler.key_averages():
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        per_frame = {"microseconds": total / len(views), "calls": event.count / len(views)}
        steps.append({"name": event.key, **per_frame})
    return sorted((step for step in steps if step["microseconds"] > 0), key=lambda step: -step["microseconds"])


def measure(
    renderer: FieldRenderer, cameras: Cameras, split: Split, views: Sequence[int], background: Tensor
) -> tuple[dict[str, Any], list[Tensor]]:
    """Times and profiles one backend; returns its row without quality metrics, and its frames."""
    device = background.device
    draw(renderer, cameras, views if device.type == "cuda" else views[:1], device)
    seconds, frames = draw(renderer, cameras, views, device)
    ordered = sorted(1e3 * s for s in seconds)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    row = {
        "backend": renderer.backend,
        "frames": len(frames),
        "size": [cameras.width, cameras.height],
        "fps": len(seconds) / sum(seconds),
        "ms": {"mean": statistics.fmean(ordered), "median": statistics.median(ordered), "low": low, "high": high},
        "ms_per_view": {split.names[index]: 1e3 * s for index, s in zip(views, seconds, strict=True)},
        "profile": profile_steps(renderer, cameras, views, device),
    }
    return row, frames


def run(
    trained: TrainedModel, split: Split, views: Sequence[int], device: torch.device, only: str
) -> list[dict[str, Any]]:
    """Measures and evaluates the backends whose name contains ``only``."""
    background = trained.model.background
    cameras = split.cameras.to(device)
    settings = {
        "steps_trained": trained.steps,
        "parameters": sum(parameter.numel() for parameter in trained.field.parameters()),
        "resolution": list(trained.field.grid.resolution),
        "sampling": {**asdict(trained.model.sampling), "precision": str(trained.model.sampling.precision)},
    }
    rows: list[dict[str, Any]] = []
    first: list[Tensor] = []
    backends = (fastest_backend(trained.field, trained.model.image_backends).name, "render_view")
    for backend in dict.fromkeys(backends):
        if only not in backend:
            continue
        row, frames = measure(trained.renderer(backend), cameras, split, views, background)
        first = first or frames
        rows.append({**row, **judge(frames, split, views, background, first), **settings})
        print(f"{backend}: {len(frames)} frames drawn and evaluated", flush=True)
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    """Formats a line for each backend; the ratio is relative to the last one."""
    lines = []
    for row in rows:
        times = [f"{row['ms'][key]:.3f}" for key in ("mean", "median", "low", "high")]
        quality = [f"{row['psnr']:.3f}", f"{row['ssim']:.4f}", f"{row['off']:.1e}"]
        ratio = f"{row['fps'] / rows[-1]['fps']:.2f}x"
        lines.append([row["backend"], f"{row['fps']:.1f}", ratio, *times, *quality])
    header = ["drawn by", "fps", "ratio", "ms", "median", "10 %", "90 %", "PSNR", "SSIM", "off"]
    return harness.table(header, lines)


def profile_table(row: dict[str, Any]) -> str:
    """Formats the longest steps of a row's frames."""
    total = sum(step["microseconds"] for step in row["profile"])
    lines = [
        [
            step["name"][:90],
            f"{step['microseconds']:.1f}",
            f"{100 * step['microseconds'] / total:.1f}%",
            f"{step['calls']:.1f}",
        ]
        for step in row["profile"][:PRINTED_STEPS]
    ]
    lines.append(["all", f"{total:.1f}", "100.0%", ""])
    return harness.table([f"{row['backend']}, a frame", "us", "share", "calls"], lines)


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, renders and evaluates the frames, and prints the tables last."""
    parser = harness.parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory or a checkpoint")
    parser.add_argument("--split", default="test", help="whose cameras (default: test)")
    parser.add_argument("--data-root", type=Path, help="folder of scenes; default: data.root of the run")
    parser.add_argument("--missing-images", choices=("error", "skip"), help="default: data.missing_images of the run")
    parser.add_argument("--views", type=int, help="draw so many, spread evenly; default: all")
    parser.add_argument("--supersampling", type=int, help="default: as the run was evaluated")
    parser.add_argument("--min-weight", type=float, help="default: as the run was evaluated")
    parser.add_argument("--voxels-per-step", type=float, help="default: as the run was evaluated")
    options = parser.parse_args(arguments)
    for name in ("views", "supersampling"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    if options.min_weight is not None and not options.min_weight >= 0:
        parser.error(f"--min-weight must be at least 0, got {options.min_weight}")
    if options.voxels_per_step is not None and not options.voxels_per_step > 0:
        parser.error(f"--voxels-per-step must be positive, got {options.voxels_per_step}")
    session = harness.start(options)

    trained = voxelfield.load(options.run, session.device)
    changes = {name: getattr(options, name) for name in ("supersampling", "min_weight", "voxels_per_step")}
    stated = {name: value for name, value in changes.items() if value is not None}
    trained.model.sampling = replace(trained.model.sampling, **stated)
    scene = load_run_scene(trained, options.split, options.data_root, options.missing_images)
    split = scene.split(options.split)
    frames = min(options.views or len(split), QUICK_FRAMES if options.quick else len(split))
    rows = run(trained, split, evenly_spaced(frames, len(split)), session.device, options.only)

    session.announce()
    if rows:
        size = "{} x {}".format(*rows[0]["size"])
        print(f"{scene.name}, {options.split}: {rows[0]['frames']} frames of {size}")
        print("\n" + as_table(rows))
    for row in rows:
        if row["profile"]:
            print("\n" + profile_table(row))
    if options.json:
        session.write(options.json, "render", __doc__, rows)


if __name__ == "__main__":
    main()
