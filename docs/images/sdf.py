"""Draws sdf.jpg: a photograph, and a view and the surface of the field of docs/models.md, trained as that page says.

Run it from the project's root with the tests' requirements installed; it trains for a minute on two idle CPU cores.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import torch
import trimesh
from mesh_depth import drawn
from PIL import Image

from voxelfield import Session, load_scene
from voxelfield.export.mesh import FieldSurface
from voxelfield.rendering.paths import at_size
from voxelfield.rendering.pixels import to_uint8

FOLDER = Path(__file__).parent
SIDE, TEST_VIEW = 320, 4


def main() -> None:
    """Writes the picture."""
    page = (FOLDER.parent / "models.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^`sdf_field.py`\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    sdf_field = sys.modules["sdf_field"] = types.ModuleType("sdf_field")  # where dataclasses look up annotations
    exec(compile(code, "sdf_field.py", "exec", dont_inherit=True), sdf_field.__dict__)

    scene = load_scene("bricks", image_size=200)
    session = Session(scene, sdf_field.SDFConfig(beta=0.05), optimizer="adamw", trainer="cpu", device="cpu")
    session.fit()
    print(session.evaluate(progress=False))
    run = session.result()
    cameras = at_size(scene.test.cameras[[TEST_VIEW]], SIDE, SIDE)
    mesh = FieldSurface(run.model).mesh(largest_component=True)
    shape = trimesh.Trimesh(mesh.vertices.numpy(), mesh.faces.numpy(), process=False)
    shape.visual.face_colors = (200, 200, 200, 255)
    rgb, alpha = (scene.test.image(TEST_VIEW).float() / 255).split((3, 1), dim=-1)
    photograph = Image.fromarray(to_uint8(alpha * rgb + 1 - alpha).numpy()).resize((SIDE, SIDE))
    views = torch.cat((run.renderer(supersampling=2).view(cameras, 0).rgb, drawn(shape, cameras, 0)), dim=1)
    strip = Image.new("RGB", (3 * SIDE, SIDE))
    strip.paste(photograph, (0, 0))
    strip.paste(Image.fromarray(to_uint8(views).numpy()), (SIDE, 0))
    strip.save(FOLDER / "sdf.jpg", quality=85)


if __name__ == "__main__":
    main()
