"""Decoders that are not this package's own."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from voxelfield import Decoder, FieldRenderer, Model, RenderSettings, VoxelGrid, render
from voxelfield.fields.decoders import SHDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.fields.field import RadianceField
from voxelfield.rendering.march import march, select
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.paths import overview

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
RADIUS, THICKNESS, STEP, THRESHOLD = 0.6614, 0.018, 0.05, 0.01  # no vertex is near that radius


class ShellDecoder(Decoder):
    """Density that peaks where a signed distance, the first feature, passes zero."""

    channels = 4

    def density(self, features: Tensor) -> Tensor:
        return 50 * torch.exp(-((features[..., 0].float() / THICKNESS) ** 2))

    def forward(self, features: Tensor, directions: Tensor, ray_index: Tensor) -> tuple[Tensor, Tensor]:
        return self.density(features), torch.sigmoid(features[:, 1:].float())


class LinearDecoder(ShellDecoder):
    density_is_monotonic = True

    def density(self, features: Tensor) -> Tensor:
        return features[..., 0].float().relu()


class Peak(DensityActivation):
    is_monotonic = False


def make_sphere(device: torch.device) -> RadianceField:
    grid = VoxelGrid(9, 4, BOX)
    with torch.no_grad():
        grid.features.zero_()
        grid.features[..., 0] = grid.vertices().norm(dim=-1) - RADIUS
    return RadianceField(grid, ShellDecoder()).to(device)


def test_a_surface_between_vertices_stays_occupied(device):
    field = make_sphere(device)
    assert field.vertex_density() is None, "nothing is assumed of a decoder that says nothing"
    at_vertices = field.density(field.grid.vertices().reshape(-1, 3))
    assert at_vertices.max() * STEP < THRESHOLD, "the vertices alone would show an empty field"
    occupancy = OccupancyGrid(16, BOX).to(device)
    for _ in range(30):
        occupancy.update_from_samples(field.density, STEP, THRESHOLD)
    directions = torch.nn.functional.normalize(torch.randn(2000, 3, device=device), dim=-1)
    # Interpolation moves the surface a little: walk along each direction to where it is densest.
    radii = torch.linspace(0.4, 0.8, 401, device=device)
    along = radii[:, None, None] * directions
    best = field.density(along.reshape(-1, 3)).view(401, -1).argmax(dim=0)
    surface = radii[best, None] * directions
    cells = ((surface + 1) * 8).long().clamp(0, 15)
    assert occupancy.occupied[cells.unbind(-1)].float().mean() > 0.95
    assert occupancy.fraction() < 0.5


def test_a_decoder_may_say_that_vertices_suffice(device):
    field = RadianceField(VoxelGrid(5, 4, BOX, init_std=1.0), LinearDecoder()).to(device)
    assert torch.equal(field.vertex_density(), field.grid.features[..., 0].relu())


@pytest.mark.parametrize(
    ("activation", "monotonic"), [(DensityActivation(5.0, 0.5), True), (Peak(5.0, 0.5), False), (nn.Softplus(), False)]
)
def test_an_activation_says_whether_it_is_monotonic(activation, monotonic):
    field = RadianceField(VoxelGrid(5, 4, BOX), SHDecoder(0, activation))
    assert (field.vertex_density() is not None) == monotonic


def test_a_decoder_without_parameters_or_view_channels_is_enough(device):
    field = make_sphere(device)
    points = torch.rand(20, 3, device=device)
    density, rgb = field(points, torch.randn(20, 3, device=device))
    assert density.shape == (20,)
    assert rgb.shape == (20, 3)


class Plain(nn.Module):
    """A decoder that derives from no class of voxelfield."""

    channels = 4

    def density(self, features):
        return 20 * features[:, 0].exp()

    def forward(self, features, directions, ray_index):
        return self.density(features), features[:, 1:].sigmoid()


class Ball:
    """A field that derives from no class of voxelfield."""

    aabb = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])

    def density(self, points):
        return 50.0 * (points.norm(dim=1) < 0.5)

    def sample(self, samples, directions):
        return self.density(samples.positions), torch.full_like(samples.positions, 0.2)


@dataclass(frozen=True)
class Sealed:
    """A field whose objects cannot be changed."""

    aabb: ClassVar[Tensor] = Ball.aabb
    density = Ball.density
    sample = Ball.sample


def test_a_field_without_a_base_class_can_be_planned_and_placed_by_its_user():
    model = Model(Ball(), OccupancyGrid(4, Ball.aabb))
    estimate = model.estimate_memory(
        8, rays=10, candidates=10, visible=10, copies=torch.float16, moments=torch.float32, feature_bytes=0
    )
    assert estimate.total > 0

    class Other(Ball):
        pass

    rays = overview(Ball.aabb, 32, 32).image_rays(0, Ball.aabb)
    settings, occupancy = RenderSettings(0.05), OccupancyGrid(4, Ball.aabb)

    def evenly(field, rays, occupancy, settings, jitter=False, capacity=None):
        samples = march(rays, occupancy, settings.step)
        return select(field, samples, settings, rays=rays), samples.ray_offsets[-1]

    assert render(Other(), rays, occupancy, settings, sampler=evenly).opacity.max() > 0.5


def test_decoders_and_fields_without_a_base_class_get_its_defaults():
    field = RadianceField(VoxelGrid(4, 4, ((-1, -1, -1), (1, 1, 1))), Plain())
    assert field.decoder.view_channels == ()
    assert field.decoder.density_is_monotonic is False
    occupancy = OccupancyGrid(4, field.aabb)
    camera = overview(field.aabb, 16, 16)
    for shown in (field, Ball(), Sealed(), copy.deepcopy(field), copy.copy(field), pickle.loads(pickle.dumps(field))):
        view = FieldRenderer(shown, occupancy, RenderSettings(0.05), torch.ones(3)).view(camera, 0)
        assert float(view.opacity.max()) > 0.5
    assert FieldRenderer(Ball(), occupancy, RenderSettings(0.05), torch.ones(3)).view(camera, 0).opacity[0, 0] == 0


def test_a_missing_member_is_named():
    class Colourless:
        aabb = Ball.aabb
        density = Ball.density

    occupancy = OccupancyGrid(4, Ball.aabb)
    with pytest.raises(TypeError, match="field must be a Field, got Colourless without sample"):
        FieldRenderer(Colourless(), occupancy, RenderSettings(0.05), torch.ones(3))
    with pytest.raises(TypeError, match="decoder must be a Decoder, got Linear without channels, density"):
        RadianceField(VoxelGrid(4, 4, ((-1, -1, -1), (1, 1, 1))), nn.Linear(4, 4))
