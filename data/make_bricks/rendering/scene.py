"""The model, its light and its surroundings, in the terms of Mitsuba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ImageColor

from make_bricks.arrays import Array, Triangles
from make_bricks.geometry.model import Model
from make_bricks.materials import MATERIALS
from make_bricks.rendering.encoding import decode_srgb

WORLD_PER_STUD = 0.098
WORLD_OFFSET = (0.0, 0.0, -0.74)  # keeps every part in every picture


def sky() -> NDArray[np.float32]:
    """Returns the surroundings in linear light, (32, 64, 3): pale blue above, warm at the horizon, dim below."""
    up = np.cos(np.pi * (np.arange(32) + 0.5) / 32)
    stops = [-1.0, -0.05, 0.05, 1.0]
    colours = np.array([(0.26, 0.26, 0.28), (0.36, 0.35, 0.34), (0.80, 0.76, 0.72), (0.56, 0.64, 0.76)])
    rows = np.stack([np.interp(up, stops, channel) for channel in colours.T], axis=1)
    return np.repeat(rows[:, None], 64, axis=1).astype(np.float32)


def reflectance(rgb: dict[str, Any], finish: str) -> dict[str, Any]:
    """Returns Mitsuba's description of a surface of the given colour."""
    if finish == "matt":
        return {"type": "diffuse", "reflectance": rgb}
    return {"type": "roughplastic", "diffuse_reflectance": rgb, "alpha": 0.2, "nonlinear": True}


def build_mesh(mi: Any, vertices: Array, triangles: Triangles, bsdf: Any, uv: Array | None = None) -> Any:
    """Turns a triangle mesh in studs into one of Mitsuba's in world units."""
    properties = mi.Properties()
    properties["bsdf"] = mi.load_dict(bsdf)
    mesh = mi.Mesh("mesh", len(vertices), len(triangles), has_vertex_texcoords=uv is not None, props=properties)
    parameters = mi.traverse(mesh)
    world = vertices * WORLD_PER_STUD + WORLD_OFFSET
    parameters["vertex_positions"] = world.astype(np.float32).ravel()
    parameters["faces"] = triangles.astype(np.uint32).ravel()
    if uv is not None:
        parameters["vertex_texcoords"] = uv.astype(np.float32).ravel()
    parameters.update()
    return mesh


def build_scene(mi: Any, model: Model) -> Any:
    """Returns Mitsuba's scene of the model under a soft sun and the sky."""
    sun = mi.ScalarTransform4f().look_at(origin=[-3.4, -4.4, 5.6], target=[0, 0, 0], up=[0, 0, 1])
    scene: dict[str, Any] = {
        "type": "scene",
        "integrator": {"type": "path", "max_depth": 6, "hide_emitters": True},
        "sky": {
            "type": "envmap",
            "bitmap": mi.Bitmap(sky()),
            "to_world": mi.ScalarTransform4f().rotate([1, 0, 0], 90),
        },
        "sun": {
            "type": "rectangle",
            "to_world": sun,
            "emitter": {"type": "area", "radiance": {"type": "rgb", "value": [46.0, 43.0, 38.0]}},
        },
    }
    for name, parts in model.parts.items():
        code, finish = MATERIALS[name]
        rgb = {"type": "rgb", "value": decode_srgb(np.array(ImageColor.getrgb(code)) / 255).tolist()}
        starts = np.cumsum([0] + [len(vertices) for vertices, _ in parts[:-1]])
        vertices = np.concatenate([vertices for vertices, _ in parts])
        triangles = np.concatenate([faces + start for (_, faces), start in zip(parts, starts, strict=True)])
        scene[name] = build_mesh(mi, vertices, triangles, reflectance(rgb, finish))
    square = np.array([(0, 1), (1, 1), (1, 0), (0, 0)], float)
    halves = np.array([(0, 1, 2), (0, 2, 3)], np.uint32)
    for k, panel in enumerate(model.panels):
        picture = {"type": "bitmap", "bitmap": mi.Bitmap(panel.image), "raw": False}
        scene[f"panel{k}"] = build_mesh(mi, panel.corners, halves, reflectance(picture, "matt"), square)
    return mi.load_dict(scene)
