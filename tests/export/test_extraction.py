"""Marching cubes in slabs: where the surface is, that seams do not show, and what is evaluated."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from voxelfield.export import lattice, surfaces
from voxelfield.export.lattice import Lattice, occupied_layers
from voxelfield.export.surfaces import (
    Surface,
    density_surface,
    extract_surface,
    half_absorbing_density,
    surface_normals,
)
from voxelfield.fields.callbacks import CallbackField
from voxelfield.models.model import Model
from voxelfield.rendering.occupancy import OccupancyGrid

trimesh = pytest.importorskip("trimesh")
pytest.importorskip("skimage")

BOX = ((-1.0, -1.5, -1.0), (1.0, 0.5, 2.0))
CENTRE = torch.tensor([0.1, -0.4, 0.3])
LATTICE = Lattice.over(BOX, (0.08, 0.07, 0.09)).enlarged()


class CountingField(CallbackField):
    """Records the numbers of points at which its density was evaluated."""

    def __init__(self, density):
        super().__init__(density, lambda points, directions: points, BOX)
        self.asked: list[int] = []
        self.points: list[Tensor] = []

    def density(self, points: Tensor) -> Tensor:
        self.asked.append(len(points))
        self.points.append(points)
        return super().density(points)


def ball(points: Tensor) -> Tensor:
    """Grows more than a thousandfold within one cell."""
    return torch.exp(100 * (0.6 - (points - CENTRE).norm(dim=-1)).clamp(-0.8, 0.3))


def maze(points: Tensor) -> Tensor:
    """Thin walls and tunnels, with many ambiguous cubes."""
    x, y, z = (17 * points).unbind(-1)
    return torch.exp(6 * (torch.sin(x) * torch.cos(y) + torch.sin(y) * torch.cos(z) + torch.sin(z) * torch.cos(x)))


def limit_memory(monkeypatch, slab: int, chunk: int = lattice.CHUNK) -> None:
    """Limits the layers of cells and the evaluations at once."""
    monkeypatch.setattr(surfaces, "SLAB", slab)
    for module in (lattice, surfaces):
        monkeypatch.setattr(module, "CHUNK", chunk)


def surface_of(density, level: float = 1.0, occupied: Tensor | None = None) -> tuple[Surface, CountingField]:
    occupancy, field = OccupancyGrid(8, BOX), CountingField(density)
    if occupied is not None:
        occupancy.occupied.copy_(occupied)
    return density_surface(Model(field, occupancy), level), field


def mesh_of(vertices: Tensor, faces: Tensor):
    return trimesh.Trimesh(vertices.numpy(), faces.numpy(), process=False)


def triangles(vertices: Tensor, faces: Tensor) -> set[tuple[float, ...]]:
    """Triangles as numbers, each beginning with its first vertex in order."""
    found = set()
    for corners in vertices[faces].tolist():
        first = corners.index(min(corners))
        found.add(tuple(number for corner in corners[first:] + corners[:first] for number in corner))
    return found


def test_a_ball_has_its_radius_and_faces_outwards():
    surface, _ = surface_of(ball)
    vertices, faces = extract_surface(surface, LATTICE)
    assert (vertices - CENTRE).norm(dim=-1).sub(0.6).abs().max() < 0.09 / 200
    mesh = mesh_of(vertices, faces)
    assert mesh.is_watertight
    assert mesh.is_winding_consistent
    assert mesh.volume == pytest.approx(4 / 3 * math.pi * 0.6**3, rel=0.02)
    normals = surface_normals(surface, vertices, 0.08)
    outwards = torch.nn.functional.normalize(vertices - CENTRE, dim=-1)
    assert (normals * outwards).sum(dim=-1).min() > 0.999


@pytest.mark.parametrize("level", [0.01, 5.0, 100.0])
def test_the_level_decides_where_the_surface_is(level):
    vertices, _ = extract_surface(surface_of(ball, level)[0], LATTICE)
    radius = 0.6 - math.log(level) / 100
    assert (vertices - CENTRE).norm(dim=-1).sub(radius).abs().max() < 0.09 / 200


def test_a_voxel_of_the_default_density_absorbs_half():
    assert math.exp(-half_absorbing_density(0.02) * 0.02) == pytest.approx(0.5)


@pytest.mark.parametrize("density", [ball, maze])
def test_seams_between_slabs_do_not_show(monkeypatch, density):
    surface, _ = surface_of(density)
    monkeypatch.setattr(surfaces, "SLAB", 1000)
    whole = extract_surface(surface, LATTICE)
    expected = triangles(*whole)
    for slab in (1, 2, 7, 16):
        limit_memory(monkeypatch, slab, 999)
        parts = extract_surface(surface, LATTICE)
        assert len(parts[0]) == len(whole[0]), slab
        assert len(parts[1]) == len(whole[1]) > 1000, slab
        assert triangles(*parts) == expected, slab
        assert mesh_of(*parts).is_watertight, slab


def test_a_field_that_fills_its_box_is_closed_at_the_faces():
    vertices, faces = extract_surface(surface_of(lambda points: 5 + points[:, 0])[0], LATTICE)
    assert mesh_of(vertices, faces).is_watertight
    bounds = torch.stack((vertices.amin(dim=0), vertices.amax(dim=0)))
    assert (bounds - torch.tensor(BOX)).abs().max() < 0.09 / 100


def test_values_at_the_level_itself_make_no_holes(monkeypatch):
    limit_memory(monkeypatch, 5)
    # Zero on a whole layer of the lattice, and on lines of it.
    surface, _ = surface_of(lambda points: torch.exp((points[:, 0] * 25).round() - (points[:, 1] * 7).floor()))
    low, spacing = torch.tensor([[-1.0, -1.5, -1.0], [0.04, 1 / 7, 0.1]], dtype=torch.float64)
    fine = Lattice(low, spacing, (51, 15, 31)).enlarged()
    vertices, faces = extract_surface(surface, fine)
    assert mesh_of(vertices, faces).is_watertight
    assert len(faces.unique(dim=0)) == len(faces)


def test_empty_cells_are_neither_evaluated_nor_part_of_the_surface():
    occupied = torch.zeros(8, 8, 8, dtype=torch.bool)
    occupied[2:4, 3:6, 1:7] = True
    surface, field = surface_of(lambda points: torch.ones(len(points)) * 9, occupied=occupied)
    reached = occupied_layers(surface.model, LATTICE)(0, LATTICE.shape[0])
    vertices, faces = extract_surface(surface, LATTICE)
    low, high = torch.tensor(BOX)
    corners = torch.tensor([[2, 3, 1], [4, 6, 7]]) / 8 * (high - low) + low
    bounds = torch.stack((vertices.amin(dim=0), vertices.amax(dim=0)))
    assert (bounds - corners).abs().max() < 0.09 / 100
    assert mesh_of(vertices, faces).is_watertight
    asked = sum(field.asked) - 8 * len(vertices)  # bisections
    assert asked == int(reached.sum()) < 0.1 * reached.numel()


def test_no_occupied_cell_is_no_surface_and_no_evaluation():
    surface, field = surface_of(ball, occupied=torch.zeros(8, 8, 8, dtype=torch.bool))
    vertices, faces = extract_surface(surface, LATTICE)
    assert vertices.shape == faces.shape == (0, 3)
    assert sum(field.asked) == 0


def test_a_slab_bounds_what_is_evaluated_at_once(monkeypatch):
    surface, field = surface_of(maze)
    limit_memory(monkeypatch, 2)
    extract_surface(surface, LATTICE)
    points_per_layer = math.prod(LATTICE.shape[1:])
    assert max(field.asked) <= 3 * points_per_layer
    field.asked.clear()
    limit_memory(monkeypatch, 2, 500)
    extract_surface(surface, LATTICE)
    assert max(field.asked) == 500


def test_each_point_of_the_lattice_is_evaluated_once(monkeypatch):
    limit_memory(monkeypatch, 3, 100)
    surface, field = surface_of(lambda points: torch.full((len(points),), 0.5))
    extract_surface(surface, LATTICE)
    assert sum(field.asked) == int(occupied_layers(surface.model, LATTICE)(0, LATTICE.shape[0]).sum())


def half_known(points: Tensor) -> Tensor:
    """A ball of which nothing is known beyond a plane."""
    value = 0.6 - (points - CENTRE).norm(dim=-1)
    return torch.where(points[:, 2] < 0.5, value, torch.nan)


@pytest.mark.parametrize("slab", [3, 1000])
def test_a_surface_ends_where_nothing_is_known(monkeypatch, slab):
    limit_memory(monkeypatch, slab)
    surface = Surface(Model(CountingField(ball), OccupancyGrid(8, BOX)), half_known, math.nan)
    vertices, faces = extract_surface(surface, LATTICE)
    assert (vertices - CENTRE).norm(dim=-1).sub(0.6).abs().max() < 0.09 / 200
    assert 0.5 - 0.09 < float(vertices[:, 2].max()) < 0.5
    mesh = mesh_of(vertices, faces)
    assert mesh.is_winding_consistent
    assert not mesh.is_watertight
    (rim,) = mesh.outline().entities
    assert float(vertices[torch.from_numpy(rim.points), 2].min()) > 0.5 - 2 * 0.09
