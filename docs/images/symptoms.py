"""Draws the pictures of docs/captures.md: a held-out view as photographed, and as trained without and with a remedy.

Run it from the project's root with the tests' requirements installed; it trains for some minutes on a CPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from voxelfield import Scene, Session, load_scene
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.training.config import preset

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parents[1] / "tests"))
from moving_cameras import photographed, with_rolling_shutter  # noqa: E402
from passers_by import with_passers_by  # noqa: E402
from sky_scene import bricks_under_sky  # noqa: E402

WIDTH = 240


def trained(scene: Scene, *overrides: str) -> Session:
    """Returns a finished training."""
    session = Session(scene, preset("trainer=cpu", "trainer.preview_every=0", *overrides, device="cpu"))
    session.fit()
    print(scene.train.size_in_words, overrides, session.evaluate(progress=False).psnr, flush=True)
    return session


def save(name: str, scene: Scene, *sessions: Session) -> None:
    """Writes the first held-out photograph, and how trainings without and with a remedy render it, side by side."""
    rgb, alpha = (scene.test.images[0].float() / 255).split((3, 1), dim=-1)
    views = [alpha * rgb + 1 - alpha, *(each.renderer().view(scene.test.cameras, 0).rgb for each in sessions)]
    strip = Image.fromarray(to_uint8(torch.cat(views, dim=1)).numpy())
    strip = strip.resize((3 * WIDTH, WIDTH * strip.height * 3 // strip.width), Image.Resampling.LANCZOS)
    strip.save(FOLDER / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    small = ("model=pyramid", "trainer.steps=500", "trainer.finest_resolution=96", "trainer.loss.distortion=1e-3")
    stages = "trainer.stages=[{step:0,resolution:32},{step:100,resolution:64},{step:200,resolution:96}]"
    sky = (*small, stages, "trainer.visible_samples=32768", "model.environment=none")
    scene = bricks_under_sky(100, 40)
    save("sky", scene, trained(scene, *sky), trained(scene, *sky, "model.environment=map"))
    scene = load_scene("bricks", image_size=100)
    bricks = ("model=dense", "trainer.visible_samples=32768")
    few = replace(scene, splits=scene.splits | {"test": scene.test[4:8]})
    people = (*bricks, "trainer.steps=600")
    crowded = with_passers_by(few)[0]
    save("people", few, trained(crowded, *people), trained(crowded, *people, "trainer.loss.robust=4"))
    model = trained(scene, *bricks, "trainer.steps=900").model
    renderer = FieldRenderer(model.field, model.occupancy, model.settings, torch.zeros(3))
    test = photographed(renderer, scene.test.cameras[::3])
    still = replace(scene, splits={"train": scene.train[::2], "test": test})
    moving = with_rolling_shutter(still, renderer, turn=0.03, move=0.05)
    ignored = replace(moving.train, cameras=still.train.cameras)
    shutter = ("model=dense", "trainer.visible_samples=16384", "trainer.steps=500")
    ignoring = trained(replace(moving, splits=moving.splits | {"train": ignored}), *shutter)
    save("rolling_shutter", still, ignoring, trained(moving, *shutter))
