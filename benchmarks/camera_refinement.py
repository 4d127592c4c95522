"""Perturbs a scene's training cameras and measures how well refinement restores them.

    python benchmarks/camera_refinement.py [OVERRIDE ...] [--scene NAME] [--data-root DIR] [--noise barf|small|slight]
                                           [--seed N] [--only NAME[;NAME ...]] [--views N] [--test-steps N]
                                           [--device auto|cpu|cuda] [--threads N] [--json PATH]

The configuration is that of ``python train.py scene=NAME camera=refine OVERRIDE ...``; ``camera=adjust`` among the
overrides takes the place of ``camera=refine``. The rows of the table are four trainings:

- ``true``: the scene's own cameras, ``camera=none``;
- ``true, refined``: the scene's own cameras, ``camera=refine``, which shows what refinement and its schedule cost;
- ``perturbed``: perturbed cameras, ``camera=none``;
- ``perturbed, refined``: perturbed cameras, ``camera=refine``.

The noise ``barf`` moves each camera about the world's origin by the exponential of a twist whose six components are
normally distributed with standard deviation 0.15 (Lin et al. 2021, section 4.1: 14.9 degrees and 0.26 units on
average). ``small`` rotates each camera by 1 degree about a random axis through its position, and moves it by 2 % of its
distance from the centre of the scene's box in a random direction. ``slight`` is a tenth of that.

"degrees" and "distance" are the mean errors of the training cameras after the similarity that aligns their positions
with the true ones (Procrustes), "at first" before training; "worst" is the largest angle. PSNR is computed over the
test views, whose true cameras are moved into the frame of the refined ones by that similarity. "optimised" is the PSNR
after the pose of each test view has been refined for ``--test-steps`` steps with a fixed field, as in BARF's
evaluation. "seconds" are ``train_seconds`` of metrics.json. The last line gives the share of the PSNR lost to the noise
that refinement recovers. If wrong poses make the visual hull carve everything away, the row of ``perturbed`` has no
PSNR.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxelfield.components.refinement import refine_views
from voxelfield.components.registry import with_value
from voxelfield.datasets.scene import Scene
from voxelfield.models.training import EmptyFieldError
from voxelfield.rendering.alignment import align_cameras, pose_errors
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rigid import compose, exp_se3
from voxelfield.runs.train import load_configured_scene
from voxelfield.settings import RunConfig, preset
from voxelfield.training.session import Session

TRAININGS = ("true", "true, refined", "perturbed", "perturbed, refined")
COLUMNS = (
    *("training", "degrees at first", "distance at first", "degrees", "worst", "distance", "PSNR", "optimised"),
    "seconds",
)


def perturbed(cameras: Cameras, noise: str, centre: Tensor, seed: int) -> Cameras:
    """Returns cameras with noise in their poses.

    Args:
        cameras: N cameras on the CPU.
        noise: ``barf``, ``small`` or ``slight``.
        centre: (3,) reference point of the cameras' distances, world units.
        seed: Seed of the noise.
    """
    generator = torch.Generator().manual_seed(seed)
    count = len(cameras)
    if noise == "barf":
        motion = exp_se3(0.15 * torch.randn(count, 6, generator=generator))
        return replace(cameras, c2w=compose(motion, cameras.c2w))
    axis, way = (torch.nn.functional.normalize(torch.randn(2, count, 3, generator=generator), dim=-1)).unbind()
    strength = {"small": 1.0, "slight": 0.1}[noise]
    turn = exp_se3(torch.cat((axis * strength * torch.pi / 180, torch.zeros(count, 3)), dim=1))
    c2w = compose(cameras.c2w, turn)
    c2w[:, :3, 3] += 0.02 * strength * (c2w[:, :3, 3] - centre).norm(dim=-1, keepdim=True) * way
    return replace(cameras, c2w=c2w)


def train(name: str, scene: Scene, noisy: Cameras, settings: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Trains and evaluates as specified by one row of the table."""
    truth = scene.train.cameras
    given = noisy if name.startswith("perturbed") else truth
    config = with_value(settings, "camera.name", "refine" if "refined" in name else "none")
    splits = {"train": replace(scene.train, cameras=given)}
    session = Session(replace(scene, splits=splits), config)
    at_first = pose_errors(given, truth)
    try:
        session.fit()
    except EmptyFieldError as error:
        # Wrong poses may carve everything away.
        print(error)
        return {**dict.fromkeys(COLUMNS), "training": name, "degrees at first": float(at_first[0].mean())}
    found = given if session.cameras is None else session.cameras.refined
    angles, away = pose_errors(found, truth)
    test = replace(scene.test, cameras=align_cameras(truth, found, rotations=False).cameras(scene.test.cameras))
    # The views are already in warped coordinates.
    run = replace(session.result(), cameras=None)
    row = {
        "training": name,
        "degrees at first": float(at_first[0].mean()),
        "distance at first": float(at_first[1].mean()),
        "degrees": float(angles.mean()),
        "worst": float(angles.max()),
        "distance": float(away.mean()),
        "PSNR": run.evaluate(test, views=options.views, progress=False).psnr,
        "optimised": None,
        "seconds": session.train_seconds,
    }
    if options.test_steps > 0:
        optimised = refine_views(run.model, run.trainer, test, steps=options.test_steps, rate=config.camera.test_lr)
        row["optimised"] = run.evaluate(optimised, views=options.views, progress=False).psnr
    return row


def printed(row: dict[str, Any]) -> str:
    """Formats a row of the table."""
    texts = ("" if value is None else value if isinstance(value, str) else f"{value:.3f}" for value in row.values())
    return "| " + " | ".join(texts) + " |"


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    parser.add_argument("--scene", default="bricks")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--noise", choices=("barf", "small", "slight"), default="barf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help=f"some of: {'; '.join(TRAININGS)} (separated by ;)")
    parser.add_argument("--views", type=int, help="judge so many test views, spread evenly (default: all)")
    parser.add_argument("--test-steps", type=int, default=200)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    wanted = TRAININGS if options.only is None else tuple(name.strip() for name in options.only.split(";"))
    unknown = [name for name in wanted if name not in TRAININGS]
    if unknown:
        parser.error(f"--only must name some of {TRAININGS}, got {unknown}")
    place = [] if options.data_root is None else [f"data.root={options.data_root}"]
    settings = preset(f"scene={options.scene}", *place, "camera=refine", *options.overrides, device=options.device)
    scene = load_configured_scene(settings, Path.cwd())
    noisy = perturbed(scene.train.cameras, options.noise, scene.aabb.mean(dim=0), options.seed)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS), flush=True)
    rows = []
    for name in wanted:
        rows.append(train(name, scene, noisy, settings, options))
        print(printed(rows[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    psnr = {row["training"]: row["PSNR"] for row in rows if row["PSNR"] is not None}
    if {"true", "perturbed", "perturbed, refined"} <= psnr.keys():
        lost = psnr["true"] - psnr["perturbed"]
        print(f"\n{100 * (psnr['perturbed, refined'] - psnr['perturbed']) / lost:.1f} % of {lost:.2f} dB came back")


if __name__ == "__main__":
    main()
