"""Deferred shading: features are composited, and a network maps each ray's means and direction to its colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import reference
import torch
from torch.nn.functional import normalize

from voxelfield import FieldRenderer
from voxelfield.fields.decoders import DeferredMLPDecoder, spherical_harmonics
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.field import RadianceField, colors_at
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.models.pyramid import PyramidConfig
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays, intersect_aabb
from voxelfield.rendering.render import Rendering, render

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
EXACT = RenderSettings(step=2 / 32, min_transmittance=0.0, min_weight=0.0)
DEGREE = 2
# float16 on CUDA, float32 on the CPU.
TOLERANCE = {"cpu": 2e-6, "cuda": 5e-3}


@pytest.fixture
def field(device) -> RadianceField:
    """Fog of all colours, of which the view-dependent part is as large as the diffuse one."""
    pyramid = VoxelPyramid((3, 6, 9), 4, BOX, init_range=1.0)
    decoder = DeferredMLPDecoder(12, 16, 8, 1, DEGREE, ExponentialDensity(1.0))
    with torch.no_grad():
        decoder.color_network[-1].mul_(2)
    return RadianceField(pyramid, decoder).to(device)


@pytest.fixture
def rays(device) -> Rays:
    """Rays from outside through the box, and two that miss it."""
    origins = 4 * normalize(torch.randn(30, 3), dim=-1)
    directions = normalize(1.4 * torch.rand(30, 3) - 0.7 - origins, dim=-1)
    directions[[0, 17]] *= -1
    return Rays(origins, directions, *intersect_aabb(origins, directions, torch.tensor(BOX))).to(device)


def drawn(field: RadianceField, rays: Rays) -> Rendering:
    return render(field, rays, OccupancyGrid(4, BOX).to(rays.origins.device), EXACT)


def layers(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    for weight in weights[:-1]:
        x = torch.relu(x @ weight.T)
    return x @ weights[-1].T


def composed(field: RadianceField, rays: Rays, found: Rendering) -> torch.Tensor:
    """The rays' colours (R, 3) by formulas in float64, at the samples' distances along the rays."""
    first, second = ([w.double() for w in x] for x in (field.decoder.density_network, field.decoder.color_network))
    samples, directions = found.samples, rays.directions.double()
    t, dt = samples.t.double(), samples.dt.double()
    positions = rays.origins.double()[samples.ray_index] + t[:, None] * directions[samples.ray_index]
    grids = [reference.sample_grid(level.double(), (positions + 1) / 2) for level in field.grid.levels]
    outputs = layers(torch.cat(grids, dim=1), first)
    emitted = torch.cat((torch.sigmoid(outputs[:, 1:4]), outputs[:, 4:]), dim=1)
    sums, opacity, *_ = reference.composite(outputs[:, 0].exp(), emitted, t, dt, samples.ray_offsets)
    means = torch.where(opacity[:, None] > 0, sums / opacity[:, None].clamp(min=1e-9), 0)
    view = spherical_harmonics(directions, DEGREE)
    return opacity[:, None] * (means[:, :3] + layers(torch.cat((means, view), dim=1), second))


def trained(field: RadianceField, rays: Rays) -> list[torch.Tensor]:
    """All that receives gradients: grids, networks, and the rays of cameras that are refined."""
    return [*field.parameters(), rays.origins, rays.directions]


def test_a_ray_has_the_composed_colour_and_gradient(field, rays, device):
    rays = replace(rays, origins=rays.origins.requires_grad_(), directions=rays.directions.requires_grad_())
    found = drawn(field, rays)
    expected = composed(field, rays, found)
    torch.testing.assert_close(found.rgb.double(), expected, rtol=0, atol=5 * TOLERANCE[device.type])
    assert not found.rgb[[0, 17]].any(), "rays that miss everything have a colour"
    mix = torch.randn_like(found.rgb)
    slopes, wanted = (torch.autograd.grad((mix * rgb).sum(), trained(field, rays)) for rgb in (found.rgb, expected))
    for slope, want in zip(slopes, wanted, strict=True):
        assert want.any()
        assert (slope - want).norm() <= 50 * TOLERANCE[device.type] * want.norm()


def test_colours_of_samples_add_up_to_that_of_their_ray(field, rays, device):
    found = drawn(field, rays)
    total = torch.zeros_like(found.rgb).index_add_(
        0, found.samples.ray_index, found.weights[:, None] * found.sample_rgb
    )
    torch.testing.assert_close(total, found.rgb, rtol=0, atol=1e-5)
    assert found.sample_rgb.std(dim=0).min() > 0.05


def test_a_single_sample_has_the_colour_of_its_point(field, device):
    points, directions = 1.8 * torch.rand(20, 3) - 0.9, normalize(torch.randn(20, 3), dim=-1)
    rays = Rays(points - 1e-3 * directions, directions, torch.zeros(20), torch.full((20,), 2e-3)).to(device)
    cells, settings = OccupancyGrid(4, BOX).to(device), RenderSettings(step=2e-3, min_transmittance=0, min_weight=0)
    found = render(field, rays, cells, settings)
    assert found.samples.ray_offsets.tolist() == list(range(21))
    colors = colors_at(field, points.to(device), rays.directions)
    tolerance = {"rtol": 0, "atol": 50 * TOLERANCE[device.type]}
    torch.testing.assert_close(found.rgb / found.opacity[:, None], colors, **tolerance)
    assert (found.opacity < 0.1).any(), "no ray is translucent"
    assert (colors - field(points.to(device), -rays.directions)[1]).abs().max() > 0.1

    class Others:  # a field that is no RadianceField
        aabb, density, sample, shade = field.aabb, field.density, field.sample, field.shade

    torch.testing.assert_close(colors_at(Others(), points.to(device), rays.directions), colors)


def test_derivatives_of_shading():
    decoder = DeferredMLPDecoder(4, 8, 6, 2, DEGREE, ExponentialDensity(1.0)).double()
    features = torch.rand(5, 5, dtype=torch.float64, requires_grad=True)
    directions = normalize(torch.randn(5, 3, dtype=torch.float64), dim=-1).requires_grad_()
    assert torch.autograd.gradcheck(decoder.shade, (features, directions))
    assert torch.autograd.gradcheck(lambda x: decoder.shade(x, directions.detach()), (features,))


def test_a_pixel_is_the_mean_of_the_shaded_rays(field, device):
    pose = torch.eye(4)
    pose[2, 3] = 3.0
    camera = Cameras(pose[None], torch.tensor([[20.0, 20.0, 8.0, 6.0]]), width=16, height=12).to(device)
    cells, black = OccupancyGrid(4, BOX).to(device), torch.zeros(3, device=device)
    how = {"supersampling": 2, "pixel_averaging": "encoded", "backend": "render_view"}
    renderer = FieldRenderer(field, cells, EXACT, black, **how)
    rays = drawn(field, replace(camera.enlarged(2), across=2).image_rays(0, field.aabb)).rgb.view(12, 2, 16, 2, 3)
    torch.testing.assert_close(renderer.view(camera, 0).rgb, rays.mean(dim=(1, 3)), rtol=0, atol=1e-5)


def test_geometry_must_hold_density_and_diffuse_colour():
    with pytest.raises(ValueError, match=r"^geometry must be at least 4 for deferred shading, .*, got 3$"):
        DeferredMLPDecoder(4, 8, 3, 1, DEGREE, ExponentialDensity(1.0))
    with pytest.raises(ValueError, match=r"^model\.geometry must be at least 4 for deferred shading"):
        PyramidConfig(shading="deferred", geometry=3).check("model")
