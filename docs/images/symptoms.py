"""Draws the pictures of docs/captures.md: a held-out view as photographed, and as trained without and with a remedy.

Run it from the project's root with the tests' requirements installed; it trains for some minutes on a CPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from voxelfield import Scene, Session, load_scene
from voxelfield.rendering.pixels import to_uint8
from voxelfield.training.config import preset

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parents[1] / "tests"))
from passers_by import with_passers_by  # noqa: E402
from sky_scene import bricks_under_sky  # noqa: E402
from toned_scene import two_cameras, vignetted  # noqa: E402

WIDTH = 240


def view(scene: Scene, *overrides: str, index: int = 0, photographed: bool = False) -> torch.Tensor:
    """Trains a scene; returns a held-out view (H, W, 3) as rendered, or as its camera shows it."""
    session = Session(scene, preset("trainer=cpu", "trainer.preview_every=0", *overrides, device="cpu"))
    session.fit()
    print(overrides, session.evaluate(progress=False).psnr, flush=True)
    if not photographed:
        return session.renderer().view(scene.test.cameras, index).rgb
    views: list[torch.Tensor] = []
    session.result().evaluate(scene.test[[index]], on_view=lambda name, view, *rest: views.append(view.rgb))
    return views[0]


def save(name: str, scene: Scene, settings: tuple[str, ...], remedy: str, **shown: Any) -> None:
    """Writes the photograph, and the view without and with a remedy, side by side; ``shown`` is as for :func:`view`."""
    rgb, alpha = (scene.test.image(shown.get("index", 0)).float() / 255).split((3, 1), dim=-1)
    views = [alpha * rgb + 1 - alpha, view(scene, *settings, **shown), view(scene, *settings, remedy, **shown)]
    strip = Image.fromarray(to_uint8(torch.cat(views, dim=1)).numpy())
    strip = strip.resize((3 * WIDTH, WIDTH * strip.height * 3 // strip.width), Image.Resampling.LANCZOS)
    strip.save(FOLDER / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    small = ("model=pyramid", "trainer.steps=500", "trainer.finest_resolution=96", "trainer.loss.distortion=1e-3")
    stages = "trainer.stages=[{step:0,resolution:32},{step:100,resolution:64},{step:200,resolution:96}]"
    sky, outdoors = (*small, stages, "trainer.visible_samples=32768"), bricks_under_sky(100, 40)
    save("sky", outdoors, (*sky, "model.environment=none"), "model.environment=map")
    save("vignetting", vignetted(outdoors), (*sky, "model.environment=map"), "trainer.vignetting=true")
    scene = load_scene("bricks", image_size=100)
    scene = replace(scene, splits=scene.splits | {"test": scene.test[4:8]})
    short = ("model=dense", "trainer.steps=600", "trainer.visible_samples=32768")
    save("people", with_passers_by(scene)[0], short, "trainer.loss.robust=4")
    save("two_cameras", two_cameras(scene), short, "trainer.response=true", index=1, photographed=True)
