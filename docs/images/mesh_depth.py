"""Draws docs/images/mesh_depth.jpg: a held-out photograph, and meshes of fields trained without and with depths.

Run it from the project's root with the tests' requirements installed, and with the folder of a capture in COLMAP's
layout as its argument; it trains on eight of the photographs for some minutes on a CPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import trimesh
from PIL import Image
from scipy.spatial import cKDTree
from torch import Tensor

from voxelfield import Cameras, Scene, Session, load_scene
from voxelfield.datasets.scene import Split
from voxelfield.export.mesh import FieldSurface
from voxelfield.rendering.pixels import to_uint8
from voxelfield.settings import preset

PHOTOGRAPHS, BOX = 8, 2
POINTS = 3_000_000
ENLARGED = 4
SETTINGS = (
    "model=pyramid",
    "trainer=smoke",
    "trainer.steps=400",
    "trainer.preview_every=0",
    "trainer.finest_resolution=96",
    "trainer.stages=[{step:0,resolution:32},{step:80,resolution:64},{step:160,resolution:96}]",
)


def mesh_of(scene: Scene, depth: float) -> trimesh.Trimesh:
    """Trains a scene with a weight of its depths; returns the mesh, with vertex colours."""
    session = Session(scene, preset(*SETTINGS, f"trainer.loss.depth={depth}", device="cpu"))
    session.fit()
    print(f"depth {depth}: {session.evaluate(progress=False)}", flush=True)
    mesh = FieldSurface(session.result().model, box=BOX).mesh()
    vertices, faces, colors = (values.numpy() for values in (mesh.vertices, mesh.faces, mesh.colors))
    return trimesh.Trimesh(vertices, faces, vertex_colors=colors, process=False)


def observed_points(split: Split) -> Tensor:
    """Returns the points (M, 3) of which the views of a split have a depth."""
    points = []
    for index in range(len(split)):
        width, height = split.cameras.size(index)
        rays = split.cameras.image_rays(index, torch.zeros(2, 3))
        depth = split.extras["depth"][index, :height, :width].flatten()
        distance = depth / -(rays.directions @ split.cameras.c2w[index, :3, 2])
        points.append((rays.origins + distance[:, None] * rays.directions)[depth > 0])
    return torch.cat(points)


def drawn(mesh: trimesh.Trimesh, cameras: Cameras, index: int) -> Tensor:
    """Returns the mesh as one camera sees it, lit from there (H, W, 3), by points on it and a depth buffer."""
    places, faces = trimesh.sample.sample_surface(mesh, POINTS, seed=0)[:2]
    points, pose = torch.from_numpy(places).float(), cameras.c2w[index]
    towards = torch.nn.functional.normalize(pose[:3, 3] - points, dim=1)
    light = (towards * torch.from_numpy(mesh.face_normals[faces]).float()).sum(dim=1).abs()
    colors = torch.from_numpy(mesh.visual.face_colors[faces, :3].astype(np.float32) / 255)
    right, up, backward = ((points - pose[:3, 3]) @ pose[:3, :3]).unbind(dim=1)
    (width, height), (fx, fy, cx, cy) = cameras.size(index), cameras.intrinsics[index].tolist()
    column, row = (cx - fx * right / backward).long(), (cy + fy * up / backward).long()
    inside = (backward < 0) & (column >= 0) & (column < width) & (row >= 0) & (row < height)
    pixel = (row * width + column)[inside]
    nearest = torch.full((height * width,), torch.inf).scatter_reduce(0, pixel, -backward[inside], "amin")
    front = -backward[inside] == nearest[pixel]
    picture = torch.ones(height * width, 3)
    picture[pixel[front]] = ((0.3 + 0.7 * light)[:, None] * colors)[inside][front]
    return picture.view(height, width, 3)


def main(folder: str) -> None:
    """Writes the picture and prints distances."""
    scene = load_scene(folder, image_size=130, depth=True)
    chosen = [number * len(scene.train) // PHOTOGRAPHS for number in range(PHOTOGRAPHS)]
    scene = replace(scene, splits=scene.splits | {"train": scene.train[chosen]})
    points, middle = observed_points(scene.test).numpy(), scene.test.cameras.c2w[:, :3, 3].mean(dim=0).numpy()
    index = len(scene.test) // 2
    cameras = scene.test.cameras.enlarged(ENLARGED)
    photograph = Image.fromarray(scene.test.image(index).numpy()[..., :3]).resize(cameras.size(index))
    pictures = [np.asarray(photograph)]
    for depth in (0.0, 0.3):
        mesh = mesh_of(scene, depth)
        pictures.append(to_uint8(drawn(mesh, cameras, index)).numpy())
        off = cKDTree(trimesh.sample.sample_surface(mesh, POINTS, seed=0)[0]).query(points)[0]
        share = 100 * off / np.linalg.norm(points - middle, axis=1)
        print(f"{len(points)} points are {share.mean():.1f} % off in the mean, {np.median(share):.1f} % in the median")
    strip = Image.fromarray(np.concatenate(pictures, axis=1))
    strip = strip.resize((strip.width // 2, strip.height // 2), Image.Resampling.LANCZOS)
    strip.save(Path(__file__).with_suffix(".jpg"), quality=88)


if __name__ == "__main__":
    main(sys.argv[1])
