"""PSNR of photographs that have one of the troubles of docs/captures.md, without and with its remedy.

    python benchmarks/symptoms.py [OVERRIDE ...] [--only NAME ...] [--seeds N] [--device cpu|cuda] [--json PATH]

The troubles are added to the photographs of a scene of objects cut out, by default those of the bundled bricks. Each
row of the table is the training on one set of photographs with one setting, with the PSNR of each seed over the
held-out views, which the trouble does not affect; those of cameras that vignette or respond differently are compared as
their cameras show them. Overrides are those of train.py, and apply to all trainings. docs/experiments/photographs.md
has figures of ``trainer=fast``; with ``trainer=cpu trainer.image_size=100`` a training takes half a minute.

- ``people``: passers-by in every third photograph.
- ``corners``: light falls off to 30 % in the corners of photographs of cameras that are turned at random.
- ``responses``: every second photograph is by a camera of another response.
- ``exposure``: gains that vary within each photograph.
- ``blur``: every fourth photograph is blurred.
- ``shutter``: cameras turn by 0.03 radians and move by 0.05 units while the rows of a photograph are exposed. A field
  that was trained before renders what they show.
- ``spheres``: the same field in whole spheres from half the distance, next to cubes of as many pixels in the same
  places, of which those sides are left out that show nothing. There is no remedy to compare with: both should be
  equally sharp.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _harness as harness
import torch

from voxelfield.datasets.scene import Scene
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.runs.train import load_configured_scene
from voxelfield.settings import preset
from voxelfield.training.session import Session

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from moving_cameras import photographed, spheres_at, with_rolling_shutter
from passers_by import with_blur, with_passers_by
from toned_scene import turned, two_cameras, unevenly_exposed, vignetted

EQUAL = torch.ones(3)
"""Exponents of a second camera that responds as the first one."""


@dataclass(frozen=True)
class Training:
    """Photographs, and how they are trained.

    Attributes:
        photographs: Their trouble, in words.
        setting: What is done about it, in words.
        scene: The photographs and the held-out views.
        overrides: Those of the setting.
    """

    photographs: str
    setting: str
    scene: Scene
    overrides: tuple[str, ...] = ()


def remedied(trouble: str, scene: Scene, clean: Scene, *remedies: str) -> list[Training]:
    """Returns trainings without and with each remedy, on photographs with a trouble and on those without."""
    return [
        Training(photographs, setting or "none", each, (setting,) if setting else ())
        for photographs, each in ((trouble, scene), ("clean", clean))
        for setting in ("", *remedies)
    ]


def of_shutter(scene: Scene, renderer: FieldRenderer) -> list[Training]:
    """Returns trainings on photographs of cameras that move, with one pose or one for each row, and of others."""
    splits = {
        "train": photographed(renderer, scene.train.cameras[::2]),
        "test": photographed(renderer, scene.test.cameras),
    }
    still = replace(scene, splits=splits, all_poses=None)
    moving = with_rolling_shutter(still, renderer, turn=0.03, move=0.05)
    one_pose = replace(moving.train, cameras=still.train.cameras)
    return [
        Training("cameras move", "one pose each", replace(moving, splits=splits | {"train": one_pose})),
        Training("cameras move", "velocities", moving),
        Training("cameras stand still", "none", still),
    ]


def of_spheres(scene: Scene, renderer: FieldRenderer) -> list[Training]:
    """Returns trainings on photographs all round, and on the sides of cubes with as many pixels."""
    centre, cameras = scene.aabb.mean(dim=0), scene.train.cameras[::2]
    places = centre + (cameras.c2w[:, :3, 3] - centre) / 2
    # From half the distance, half as many pixels per radian show the scene as finely as the held-out views do.
    width = 2 * round(math.pi / 2 * float(cameras.intrinsics[:, 0].mean()))
    # The six sides of a cube of this many pixels have as many pixels as a sphere.
    side = width / math.sqrt(12)
    spheres, smaller = (
        spheres_at(places, each, torch.Generator().manual_seed(0)) for each in (width, 2 * round(math.pi * side / 2))
    )
    cubes = photographed(renderer, smaller.pinholes(all_round=True))
    shown = (cubes.images[..., 3] > 0).flatten(1).any(dim=1).nonzero().flatten()
    test = photographed(renderer, scene.test.cameras)
    sets = {"whole spheres": photographed(renderer, spheres), "sides of cubes": cubes[shown]}
    return [
        Training(name, "none", replace(scene, splits={"train": train, "test": test}, all_poses=None))
        for name, train in sets.items()
    ]


def trained(scene: Scene, overrides: Sequence[str], device: str, seed: int = 0) -> Session:
    """Trains a scene."""
    changes = ("trainer.preview_every=0", "trainer.checkpoint_every=0", f"seed={seed}", *overrides)
    session = Session(scene, preset(*changes, device=device))
    session.fit()
    return session


def teacher(scene: Scene, overrides: Sequence[str], device: str) -> FieldRenderer:
    """Trains a field that renders photographs, before black."""
    model = trained(scene, overrides, device).model
    return FieldRenderer(model.field, model.occupancy, model.settings, torch.zeros_like(model.background))


Maker = Callable[[Scene, Callable[[], FieldRenderer]], list[Training]]
MAKERS: dict[str, Maker] = {
    "people": lambda scene, _: remedied("passers-by", with_passers_by(scene)[0], scene, "trainer.loss.robust=4"),
    "corners": lambda scene, _: remedied(
        "dark corners", vignetted(turned(scene)), turned(scene), "trainer.vignetting=true"
    ),
    "responses": lambda scene, _: remedied(
        "two responses", two_cameras(scene), two_cameras(scene, EQUAL), "trainer.response=true"
    ),
    "exposure": lambda scene, _: remedied(
        "uneven exposure",
        replace(scene, splits=scene.splits | {"train": unevenly_exposed(scene.train, 0.15)}),
        scene,
        "trainer.exposure=affine",
    ),
    "blur": lambda scene, _: remedied("blurred", with_blur(scene), scene, "trainer.loss.sharpness=1"),
    "shutter": lambda scene, renderer: of_shutter(scene, renderer()),
    "spheres": lambda scene, renderer: of_spheres(scene, renderer()),
}


def as_row(row: dict[str, Any]) -> list[str]:
    """Formats a row of the table."""
    return [row["photographs"], row["setting"], " ".join(f"{psnr:.2f}" for psnr in row["psnr"]), f"{row['mean']:.2f}"]


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    parser.add_argument("--only", nargs="+", choices=MAKERS, default=list(MAKERS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="trainings of each kind (default: 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_intermixed_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    scene = load_configured_scene(preset(*options.overrides, device=options.device), Path.cwd())
    renderers: list[FieldRenderer] = []

    def renderer() -> FieldRenderer:
        if not renderers:
            renderers.append(teacher(scene, options.overrides, options.device))
        return renderers[0]

    rows: list[dict[str, Any]] = []
    for name in options.only:
        for training in MAKERS[name](scene, renderer):
            overrides = (*options.overrides, *training.overrides)
            found = [
                trained(training.scene, overrides, options.device, seed).evaluate(progress=False).psnr
                for seed in range(options.seeds)
            ]
            rows.append(
                {
                    "trouble": name,
                    "photographs": training.photographs,
                    "setting": training.setting,
                    "psnr": found,
                    "mean": statistics.mean(found),
                }
            )
            print(f"{name}: {as_row(rows[-1])}", flush=True)
    print("\n" + harness.table(["photographs", "setting", "PSNR of each seed", "mean"], list(map(as_row, rows))))
    if options.json:
        content = {
            "benchmark": "symptoms",
            "machine": harness.machine(torch.device(options.device)),
            "overrides": options.overrides,
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
