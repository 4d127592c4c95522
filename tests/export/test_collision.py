"""The closed mesh on which other programs walk: its places, its cavities and its file."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from balls import CENTRE, RADIUS, ball_field, cameras_around

from voxelfield.export.collision import COLLISION, collision_mesh
from voxelfield.models import Model, Sampling

trimesh = pytest.importorskip("trimesh")
pytest.importorskip("skimage")
pytest.importorskip("fast_simplification")

VOLUME = 4 / 3 * math.pi * RADIUS**3
CAMERAS = cameras_around(3, 10)


def ball() -> Model:
    return Model(*ball_field(), Sampling(voxels_per_step=0.5))


def closed(vertices: torch.Tensor, faces: torch.Tensor):
    """Returns a mesh that is closed: an even number of triangles meet at each edge."""
    mesh = trimesh.Trimesh(vertices.numpy(), faces.numpy(), process=False)
    _, counts = np.unique(mesh.edges_sorted, axis=0, return_counts=True)
    assert (counts % 2 == 0).all()
    assert mesh.is_winding_consistent
    return mesh


@pytest.mark.parametrize(("resolution", "cell"), [(64, 1.0), (26, 2.0), (13, 4.0)])
def test_cells_of_a_ball_are_solid(resolution, cell):
    mesh = closed(*collision_mesh(ball(), CAMERAS, resolution=resolution))
    distances = np.linalg.norm(mesh.vertices - CENTRE.numpy(), axis=1)
    # A cell is solid if any of its points is, so the mesh is larger by up to a cell; its corners are cut off.
    assert distances.min() > RADIUS - cell
    assert distances.max() < RADIUS + 1.3 * cell
    assert 0.9 * VOLUME < mesh.volume < VOLUME * (1 + cell / RADIUS) ** 3
    assert mesh.euler_number == 2
    assert len(mesh.faces) < 13 * (2 * RADIUS / cell) ** 2


def test_what_nobody_can_reach_is_solid():
    hollow = ball()
    hollow.occupancy.occupied[7:9, 7:9, 7:9] = False
    filled = closed(*collision_mesh(hollow, CAMERAS))
    assert filled.volume == pytest.approx(closed(*collision_mesh(ball())).volume)
    inside = CAMERAS[:1]
    inside.c2w[:, :3, 3] = CENTRE
    room = closed(*collision_mesh(hollow, inside))
    assert len(room.split(only_watertight=False)) == 2
    # Two cells of 16 along each edge of the box are empty.
    assert filled.volume - room.volume == pytest.approx(40 / 8 * 50 / 8 * 40 / 8, rel=0.3)


def test_a_file_has_y_up_in_the_units_of_the_scene(tmp_path):
    model = ball()
    vertices, faces = collision_mesh(model, CAMERAS, resolution=20)
    source = SimpleNamespace(model=model, training_cameras=lambda: CAMERAS, once=lambda function: torch.eye(3))
    assert COLLISION.write(tmp_path / "a.glb", source, resolution=20) == f"{len(faces)} triangles"
    mesh = trimesh.load(tmp_path / "a.glb", force="mesh", process=False)
    x, y, z = vertices.T.numpy()
    assert np.allclose(mesh.vertices, np.stack((x, z, -y), axis=1))
    assert mesh.volume == pytest.approx(closed(vertices, faces).volume, rel=1e-4)


def test_an_empty_field_has_no_collision_mesh():
    empty = ball()
    empty.occupancy.occupied.zero_()
    with pytest.raises(ValueError, match="field must have something solid for a collision mesh, got none"):
        collision_mesh(empty)
    with pytest.raises(ValueError, match="resolution must be an int of at least 1, got 0"):
        collision_mesh(ball(), resolution=0)
