"""RadianceField: a grid and a decoder together."""

from __future__ import annotations

import pytest
import torch
from reference import sample_grid

from voxelfield import VoxelGrid, VoxelPyramid
from voxelfield.fields.decoders import ColorMLPDecoder, FusedMLPDecoder, SHDecoder
from voxelfield.fields.density import DensityActivation, ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.ops import PackedSamples

BOX = ((-1.0, 0.5, -3.0), (2.0, 1.5, 1.0))
RESOLUTION = (4, 3, 5)


def make_field(kind="sh", device="cpu"):
    density = DensityActivation(scale=5.0, initial=0.5)
    decoder = SHDecoder(2, density) if kind == "sh" else ColorMLPDecoder(6, 16, 1, 2, density)
    return RadianceField(VoxelGrid(RESOLUTION, decoder.channels, BOX, init_std=1.0), decoder).to(device)


def make_points(count, device="cpu"):
    low, high = torch.tensor(BOX)
    return (low + (high - low) * torch.rand(count, 3)).to(device)


def make_directions(count, device="cpu"):
    return torch.nn.functional.normalize(torch.randn(count, 3), dim=-1).to(device)


def make_samples(counts, device="cpu"):
    total = sum(counts)
    ray_index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
    ray_offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    t = torch.rand(total, device=device)
    rays_kept = torch.tensor([len(counts)], device=device)
    return PackedSamples(make_points(total, device), t, t, ray_index.to(device), ray_offsets.to(device), rays_kept)


both_decoders = pytest.mark.parametrize("kind", ["sh", "dense"])


@both_decoders
def test_field_is_grid_then_decoder(device, kind):
    field = make_field(kind, device)
    points, directions = make_points(50, device), make_directions(50, device)
    density, rgb = field(points, directions)
    low, high = torch.tensor(BOX).double()
    unit = (points.cpu().double() - low) / (high - low)
    features = sample_grid(field.grid.features.detach().cpu().double(), unit).float().to(device)
    view = field.decoder.encode_view(directions)
    torch.testing.assert_close(density, field.decoder.density(features), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rgb, field.decoder.rgb(features, view), rtol=1e-4, atol=1e-5)


@both_decoders
def test_colour_depends_on_the_view_and_density_does_not(device, kind):
    field = make_field(kind, device)
    points, directions = make_points(50, device), make_directions(50, device)
    density, rgb = field(points, directions)
    density_behind, rgb_behind = field(points, -directions)
    assert torch.equal(density, density_behind)
    assert (rgb - rgb_behind).abs().mean() > 1e-3


@both_decoders
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0], [40]], ids=str)
def test_packed_samples_are_seen_along_their_own_rays(device, kind, counts):
    field = make_field(kind, device)
    samples = make_samples(counts, device)
    directions = make_directions(len(counts), device)
    expected = field(samples.positions, directions[samples.ray_index])
    torch.testing.assert_close(field.sample(samples, directions), expected)


@both_decoders
def test_no_points(device, kind):
    density, rgb = make_field(kind, device)(make_points(0, device), make_directions(0, device))
    assert density.shape == (0,)
    assert rgb.shape == (0, 3)


@pytest.mark.covering
@both_decoders
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_results_are_float32_whatever_the_grid(device, kind, dtype, autocast):
    field = make_field(kind, device)
    points, directions = make_points(20, device), make_directions(20, device)
    expected = field(points, directions)
    field.grid.to(dtype)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        density, rgb = field(points, directions)
    assert density.dtype == rgb.dtype == torch.float32
    # Features of order one, rounded to eight bits.
    torch.testing.assert_close(density, expected[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(rgb, expected[1], rtol=0, atol=0.03)


@both_decoders
def test_vertex_density_is_the_density_at_the_vertices(device, kind):
    field = make_field(kind, device)
    vertices = field.grid.vertices().reshape(-1, 3)
    density, _ = field(vertices, torch.zeros_like(vertices))
    assert field.vertex_density().shape == RESOLUTION
    torch.testing.assert_close(field.vertex_density().flatten(), density, rtol=1e-4, atol=1e-5)


@both_decoders
def test_every_parameter_is_trained(device, kind):
    field = make_field(kind, device)
    density, rgb = field(make_points(2000, device), make_directions(2000, device))
    (density.sum() + rgb.square().sum()).backward()
    for name, parameter in field.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    assert field.grid.features.grad.flatten(0, 2).any(dim=0).all()


@both_decoders
def test_state_dict_round_trip(kind):
    source, target = make_field(kind), make_field(kind)
    points, directions = make_points(20), make_directions(20)
    target.load_state_dict(source.state_dict())
    torch.testing.assert_close(source(points, directions), target(points, directions), rtol=0, atol=0)


def test_a_pyramid_and_networks_make_a_field(device):
    pyramid = VoxelPyramid((3, 5, 7), 2, BOX, init_range=1.0)
    decoder = FusedMLPDecoder(6, 16, 4, 1, 2, ExponentialDensity(1.0))
    field = RadianceField(pyramid, decoder).to(device)
    samples, directions = make_samples([3, 0, 40], device), make_directions(3, device)
    density, rgb = field.sample(samples, directions)
    expected = decoder(pyramid(samples.positions), directions, samples.ray_index)
    assert torch.equal(density, expected[0])
    assert torch.equal(rgb, expected[1])
    torch.testing.assert_close(field.density(samples.positions), density)
    assert field.vertex_density() is None, "such a field can be denser between its vertices"
    (density.sum() + rgb.square().sum()).backward()
    assert all(parameter.grad.any() for parameter in field.parameters())


def test_a_sum_of_grids_and_harmonics_make_a_field(device):
    decoder = SHDecoder(1, DensityActivation(scale=5.0, initial=0.5))
    pyramid = VoxelPyramid((3, 6, 12), decoder.channels, BOX, reduce="sum", init_range=1.0)
    field = RadianceField(pyramid, decoder).to(device)
    samples, directions = make_samples([3, 0, 40], device), make_directions(3, device)
    density, rgb = field.sample(samples, directions)
    features = sum(level(samples.positions) for level in pyramid.grids)
    expected = decoder(features, directions, samples.ray_index)
    torch.testing.assert_close(density, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rgb, expected[1], rtol=1e-4, atol=1e-5)
    assert field.vertex_density() is None, "no level has the sum at its vertices"
    (density.sum() + rgb.square().sum()).backward()
    assert all(parameter.grad.any() for parameter in field.parameters())


def test_channels_must_fit():
    decoder = SHDecoder(1, DensityActivation(1.0, 0.1))
    with pytest.raises(ValueError, match=r"decoder\.channels must be 12, as the grid has, got 13"):
        RadianceField(VoxelGrid(2, 12, BOX), decoder)


def test_a_decoder_is_asked_for_the_density_of_rows_of_features(device):
    class Rows(SHDecoder):
        def density(self, features):
            assert features.dim() == 2
            return features[:, 0].float().relu()

    field = RadianceField(VoxelGrid(RESOLUTION, 4, BOX, init_std=1.0), Rows(0, DensityActivation(1.0, 1.0))).to(device)
    assert torch.equal(field.vertex_density(), field.grid.features[..., 0].relu())
