"""Compares exported surfaces of the bundled scene with the geometry from which its images were rendered.

    python train.py scene=bricks hydra.run.dir=runs/bricks_mesh
    python benchmarks/mesh.py runs/bricks_mesh [--device cpu|cuda] [--only SUBSTRING]

The table lists the level sets of the density at several levels and the surface fused from the depth of the training
views. Distances are measured in both directions, from points uniformly distributed on the visible part of one surface
to the nearest point of the other surface, visible or not: "off" is the distance of the exported surface from the truth,
"missed" the distance of the truth from the exported surface. Both are in voxels of the field.

Visibility is determined by comparing depths in buffers of 300 x 300 pixels, so edges are located to 0.012 world units.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import trimesh
from _bricks_surface import Samples, distances, modelled_surface, sample
from _run_scene import load_run_scene

import voxelfield
from voxelfield.export.lattice import box_lattice
from voxelfield.export.mesh import LEVEL_LENGTH, FieldSurface
from voxelfield.export.surfaces import half_absorbing_density
from voxelfield.rendering.cameras import Cameras
from voxelfield.trained.trained_model import TrainedModel

LEVELS = (0.5, 1.0, 2.0, 4.0)
"""Factors on the default level."""


def wanted_surfaces(run: TrainedModel) -> dict[str, dict[str, Any]]:
    """Returns the definitions of the surfaces to compare, by name."""
    default = half_absorbing_density(LEVEL_LENGTH * box_lattice(run.model)[1])
    cells = 2 * (max(run.field.grid.resolution) - 1)
    return {
        **{f"density, level {factor:g}x": {"level": factor * default} for factor in LEVELS},
        "density, half a voxel": {"resolution": cells},
        "tsdf": {"kind": "tsdf"},
        "tsdf, half a voxel": {"kind": "tsdf", "resolution": cells},
    }


def row(name: str, run: TrainedModel, options: dict[str, Any], cameras: Cameras, truth: Samples) -> str:
    """Exports a surface and returns its line of the table."""
    start = time.perf_counter()
    mesh = FieldSurface(run.model, **options, cameras=cameras).mesh(min_component=0)
    seconds = time.perf_counter() - start
    found = sample(trimesh.Trimesh(mesh.vertices.numpy(), mesh.faces.numpy(), process=False), cameras)
    _, voxel = box_lattice(run.model)
    off, missed = distances(found, truth) / voxel, distances(truth, found) / voxel
    figures = [f"{len(mesh.faces):,}", f"{seconds:.0f}"]
    for part in (off, missed):
        figures += [f"{part.mean():.2f}", f"{100 * (part < 0.5).mean():.0f} %"]
    return f"| {' | '.join([name, *figures])} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run of scene=bricks")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-root", type=Path, help="folder of scenes (default: data.root of the run)")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only surfaces with this in their name")
    arguments = parser.parse_args()
    run = voxelfield.load(arguments.run, arguments.device)
    cameras = load_run_scene(run, "train", arguments.data_root).train.cameras
    truth = sample(modelled_surface(), cameras)
    _, voxel = box_lattice(run.model)
    default = half_absorbing_density(LEVEL_LENGTH * voxel)
    print(f"a voxel is {voxel:.4f} world units long, the default level is {default:.1f}\n")
    print("| surface | triangles | seconds | off, mean | within half a voxel | missed, mean | within half a voxel |")
    print("|---|---|---|---|---|---|---|")
    for name, options in wanted_surfaces(run).items():
        if arguments.only in name:
            print(row(name, run, options, cameras, truth), flush=True)


if __name__ == "__main__":
    main()
