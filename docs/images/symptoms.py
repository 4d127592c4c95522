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
from voxelfield.datasets.scene import Split
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.settings import preset

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parents[1] / "tests"))
from moving_cameras import photographed, with_rolling_shutter  # noqa: E402
from passers_by import with_passers_by  # noqa: E402
from sky_scene import bricks_under_sky  # noqa: E402
from toned_scene import two_cameras, vignetted  # noqa: E402

WIDTH = 240


def trained(scene: Scene, *overrides: str) -> Session:
    """Returns a finished training."""
    session = Session(scene, preset("trainer=cpu", "trainer.preview_every=0", *overrides, device="cpu"))
    session.fit()
    print(scene.train.size_in_words, overrides, session.evaluate(progress=False).psnr, flush=True)
    return session


def drawn(scene: Scene, split: Split, *overrides: str) -> torch.Tensor:
    """Trains a scene; returns the only view of a split (H, W, 3) as rendered."""
    return trained(scene, *overrides).renderer().view(split.cameras, 0).rgb


def as_photographed(session: Session, split: Split) -> torch.Tensor:
    """Returns the only view of a split (H, W, 3), as its camera shows it."""
    views: list[torch.Tensor] = []
    session.result().evaluate(split, on_view=lambda name, view, *rest: views.append(view.rgb))
    return views[0]


def save(name: str, split: Split, *views: torch.Tensor) -> None:
    """Writes a photograph, the only one of a split, and views (H, W, 3) of it side by side."""
    rgb, alpha = (split.image(0).float() / 255).split((3, 1), dim=-1)
    views = (alpha * rgb + 1 - alpha, *views)
    strip = Image.fromarray(to_uint8(torch.cat(views, dim=1)).numpy())
    strip = strip.resize((3 * WIDTH, WIDTH * strip.height * 3 // strip.width), Image.Resampling.LANCZOS)
    strip.save(FOLDER / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    small = ("model=pyramid", "trainer.steps=500", "trainer.finest_resolution=96", "trainer.loss.distortion=1e-3")
    stages = "trainer.stages=[{step:0,resolution:32},{step:100,resolution:64},{step:200,resolution:96}]"
    sky, outdoors = (*small, stages, "trainer.visible_samples=32768"), bricks_under_sky(100, 40)
    dark = vignetted(outdoors)
    first = outdoors.test[[0]]
    save("sky", first, *(drawn(outdoors, first, *sky, f"model.environment={kind}") for kind in ("none", "map")))
    tones = [
        drawn(dark, first, *sky, "model.environment=map", f"trainer.vignetting={way}") for way in ("false", "true")
    ]
    save("vignetting", dark.test[[0]], *tones)
    scene = load_scene("bricks", image_size=100)
    bricks = ("model=dense", "trainer.visible_samples=32768")
    few = replace(scene, splits=scene.splits | {"test": scene.test[4:8]})
    short, first, crowded = (*bricks, "trainer.steps=600"), few.test[[0]], with_passers_by(few)[0]
    save("people", first, drawn(crowded, first, *short), drawn(crowded, first, *short, "trainer.loss.robust=4"))
    two = two_cameras(few)
    responses = [trained(two, *short, f"trainer.response={way}") for way in ("false", "true")]
    second = two.test[[1]]
    save("two_cameras", second, *(as_photographed(each, second) for each in responses))
    model = trained(scene, *bricks, "trainer.steps=900").model
    renderer = FieldRenderer(model.field, model.occupancy, model.settings, torch.zeros(3))
    test = photographed(renderer, scene.test.cameras[::3])
    still = replace(scene, splits={"train": scene.train[::2], "test": test})
    moving = with_rolling_shutter(still, renderer, turn=0.03, move=0.05)
    ignored = replace(moving.train, cameras=still.train.cameras)
    shutter = ("model=dense", "trainer.visible_samples=16384", "trainer.steps=500")
    ignoring, first = replace(moving, splits=moving.splits | {"train": ignored}), test[[0]]
    save("rolling_shutter", first, drawn(ignoring, first, *shutter), drawn(moving, first, *shutter))
