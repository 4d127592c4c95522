"""Draws pictures of a run of the bundled scene: ``python train.py``, then ``python docs/images/bricks.py RUN``.

It writes orbit.webp, of the home page, the field on a circle around it; views.jpg, of docs/rendering.md, a test view's
colours, depth and opacity; and mesh.jpg, of docs/export.md, that view of the field, and of its mesh with and without
colours. Run it from the project's root with the tests' requirements installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import trimesh
from mesh_depth import drawn
from PIL import Image

import voxelfield
from voxelfield.export.mesh import FieldSurface
from voxelfield.rendering.paths import at_size, orbit
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.view_pictures import depth_range, picture

FOLDER = Path(__file__).parent
FRAMES, SIDE, TEST_VIEW = 60, 320, 4


def main(folder: str) -> None:
    """Writes the pictures."""
    scene, run = voxelfield.load_scene("bricks"), voxelfield.load(folder)
    renderer = run.renderer(supersampling=2)
    around = at_size(orbit(scene.test.cameras, torch.zeros(3), FRAMES), SIDE, SIDE)
    first, *frames = [as_image(view.rgb) for view in run.render_path(around, renderer)]
    first.save(FOLDER / "orbit.webp", save_all=True, append_images=frames, duration=100, loop=0, quality=70, method=6)

    cameras = at_size(scene.test.cameras[[TEST_VIEW]], SIDE, SIDE)
    view, near_far = renderer.view(cameras, 0), depth_range(renderer, around)
    save("views", *(picture(view, shown, near_far) for shown in ("rgb", "depth", "opacity")))
    mesh = FieldSurface(run.model).mesh()
    vertices, faces, colors = (values.numpy() for values in (mesh.vertices, mesh.faces, mesh.colors))
    meshes = [trimesh.Trimesh(vertices, faces, vertex_colors=each) for each in (colors, np.full_like(colors, 200))]
    save("mesh", view.rgb, *(drawn(each, cameras, 0) for each in meshes))


def as_image(rgb: torch.Tensor) -> Image.Image:
    """Returns colours (H, W, 3) as an image."""
    return Image.fromarray(to_uint8(rgb).cpu().numpy())


def save(name: str, *pictures: torch.Tensor) -> None:
    """Writes pictures (H, W, 3) side by side."""
    as_image(torch.cat(pictures, dim=1)).save(FOLDER / f"{name}.jpg", quality=85)


if __name__ == "__main__":
    main(sys.argv[1])
