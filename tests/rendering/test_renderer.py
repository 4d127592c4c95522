"""FieldRenderer: which backend it takes, and that every backend draws what render_view draws."""

from __future__ import annotations

import dataclasses

import pytest
import reference
import torch
from op_testing import never_synchronising
from torch import nn

from voxelfield import FieldRenderer, VoxelGrid, VoxelPyramid
from voxelfield.fields.decoders import ColorMLPDecoder, FusedMLPDecoder, SHDecoder
from voxelfield.fields.density import DensityActivation, ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.rendering.backends import BACKENDS, ImageBackend, fastest_backend
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.march import RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import View, render_view

BOX = ((-1.0, -0.8, -1.2), (1.0, 1.1, 0.9))
SETTINGS = RenderSettings(step=0.06, min_weight=1e-3)
BACKGROUND = (1.0, 0.5, 0.25)
WIDTH, HEIGHT = 39, 26

# What a pixel may be off by, in the mean and all but one in a hundred: rays made by other roundings enter a cell a
# sample earlier or later, and float16 has 11 bits.
MEAN_ERROR = {"cpu": 5e-5, "cuda": 1e-3}
MAX_ERROR = {"cpu": 1e-3, "cuda": 1e-2}


def pyramid(resolutions=(4, 9, 20), channels=4, geometry=16, hidden=2, degree=3, width=64, density=None, **settings):
    grid = VoxelPyramid(resolutions, channels, BOX, init_range=1.5, **settings)
    networks = FusedMLPDecoder(grid.channels, width, geometry, hidden, degree, density or ExponentialDensity(8.0))
    return RadianceField(grid, networks)


def single(decoder, resolution=(9, 8, 11), **settings):
    return RadianceField(VoxelGrid(resolution, decoder.channels, BOX, init_std=1.0, **settings), decoder)


def harmonics(degree=2, **settings):
    return single(SHDecoder(degree, DensityActivation(20.0, 5.0)), **settings)


def network(**settings):
    return single(ColorMLPDecoder(6, 16, 1, 1, DensityActivation(20.0, 5.0)), **settings)


def summed(resolutions=(4, 8, 16), degree=2, decoder=None, **settings):
    decoder = decoder or SHDecoder(degree, DensityActivation(20.0, 5.0))
    grid = VoxelPyramid(resolutions, decoder.channels, BOX, reduce="sum", init_range=1.0, **settings)
    return RadianceField(grid, decoder)


def with_levels(active, make=pyramid, **settings):
    field = make(**settings)
    field.grid.activate(field.grid.resolutions[active - 1])
    return field


class OtherDecoder(SHDecoder):
    """Reads the same features as other colours."""

    def rgb(self, features, view):
        return 1 - super().rgb(features, view)


# All but the first of each kind are at a limit of what the kernel takes.
ONE_KERNEL = {
    "render_pyramid_image": {
        "pyramid": pyramid,
        "eight levels": lambda: pyramid(range(3, 11), width=128),
        "one level": lambda: pyramid((9,), width=1),
        "one hidden layer": lambda: pyramid(hidden=1, degree=0),
        "three hidden layers": lambda: pyramid(hidden=3),
        "one of three levels on": lambda: with_levels(1),
        "two of three levels on": lambda: with_levels(2),
        "eight of nine levels on": lambda: with_levels(8, resolutions=range(3, 12)),
        "float16 pyramid": lambda: pyramid().half(),
    },
    "render_grid_image": {
        **{f"harmonics of degree {n}": lambda n=n: harmonics(n) for n in range(4)},
        "a single vertex along an axis": lambda: harmonics(resolution=(7, 1, 9)),
        "float16 harmonics": lambda: harmonics().half(),
        "sum": summed,
        "sum of one level": lambda: summed((9,), degree=0),
        "two levels of three added up": lambda: with_levels(2, summed),
        "float16 sum": lambda: summed().half(),
    },
}


GENERAL = {
    "network": network,
    "two channels a level": lambda: pyramid(channels=2),
    "nine levels": lambda: pyramid(range(3, 12)),
    "geometry of 15": lambda: pyramid(geometry=15),
    "four hidden layers": lambda: pyramid(hidden=4),
    "softplus": lambda: pyramid(density=DensityActivation(20.0, 5.0)),
    "padded pyramid": lambda: pyramid(padding="zeros"),
    "padded harmonics": lambda: harmonics(padding="zeros"),
    "padded sum": lambda: summed(padding="zeros"),
    "other decoder on a sum": lambda: summed(decoder=OtherDecoder(1, DensityActivation(20.0, 5.0))),
    "exponential sum": lambda: summed(decoder=SHDecoder(1, ExponentialDensity(5.0))),
    "network on a sum": lambda: summed(decoder=FusedMLPDecoder(4, 16, 16, 1, 3, ExponentialDensity(8.0))),
    "harmonics on concatenated levels": lambda: RadianceField(
        VoxelPyramid((4, 9), 2, BOX, init_range=1.5), SHDecoder(0, DensityActivation(20.0, 5.0))
    ),
    "exponential harmonics": lambda: single(SHDecoder(1, ExponentialDensity(5.0))),
    "other decoder": lambda: single(OtherDecoder(1, DensityActivation(20.0, 5.0))),
    "network on a grid": lambda: single(FusedMLPDecoder(4, 16, 16, 1, 3, ExponentialDensity(8.0))),
    "network on a pyramid": lambda: RadianceField(
        VoxelPyramid((4, 9), 4, BOX, init_range=1.5), ColorMLPDecoder(7, 16, 1, 1, DensityActivation(20.0, 5.0))
    ),
    "bfloat16 harmonics": lambda: harmonics(dtype=torch.bfloat16),
}
FIELDS = {name: (make, backend) for backend, makers in ONE_KERNEL.items() for name, make in makers.items()}
FIELDS |= {name: (make, "render_view") for name, make in GENERAL.items()}
every_field = pytest.mark.parametrize(("make", "backend"), FIELDS.values(), ids=list(FIELDS))
each_way = pytest.mark.parametrize("make", [pyramid, harmonics, network])


def make_cameras(device):
    """Two cameras outside the box that look at it askew, and a third whose image it fills."""
    first = torch.tensor(
        [[0.8, -0.36, 0.48, 1.6], [0.6, 0.48, -0.64, -2.1], [0.0, 0.8, 0.6, 2.0], [0.0, 0.0, 0.0, 1.0]]
    )
    poses = first.repeat(3, 1, 1)
    poses[1, :3, 3] *= 1.2
    poses[2, :3, 3] *= 0.3
    lens = torch.tensor([[34.0, 35.0, 18.5, 14.0]]).repeat(3, 1)
    return Cameras(poses, lens, WIDTH, HEIGHT).to(device)


def make_occupancy(device, fraction=0.6):
    occupancy = OccupancyGrid((6, 5, 7), BOX)
    occupancy.occupied.copy_(torch.rand(6, 5, 7) < fraction)
    return occupancy.to(device)


def background_on(device):
    return torch.tensor(BACKGROUND, device=device)


def make_renderer(field, device, **options):
    return FieldRenderer(field.to(device), make_occupancy(device), SETTINGS, background_on(device), **options)


def both_ways(field, device, settings=SETTINGS, **options):
    """A renderer, and a function that renders with ``render_view`` what it renders."""
    scene = field.to(device), make_occupancy(device), settings, background_on(device)

    def general(cameras, index, chunk=400):
        field, *rest = scene
        return render_view(field, cameras, index, *rest, chunk=chunk)

    return FieldRenderer(*scene, **options), general


def assert_views_agree(view, expected, device):
    assert isinstance(view, View)
    for name, scale in (("rgb", 1.0), ("opacity", 1.0), ("depth", 3.0)):
        one, two = getattr(view, name), getattr(expected, name)
        assert one.shape == two.shape
        assert one.dtype == torch.float32
        assert one.device.type == device.type
        assert not one.requires_grad
        error = (one - two).abs()
        assert error.mean() < scale * MEAN_ERROR[device.type], name
        assert (error > scale * MAX_ERROR[device.type]).double().mean() < 0.01, name


# --- which backend


@every_field
def test_the_backend_follows_from_the_kind_of_field(make, backend):
    assert fastest_backend(make()).name == backend


def test_a_subclass_of_a_field_is_left_to_the_general_way():
    class Dimmed(RadianceField):
        def sample(self, samples, directions):
            density, rgb = super().sample(samples, directions)
            return density, rgb / 2

    plain = harmonics()
    assert fastest_backend(Dimmed(plain.grid, plain.decoder)).name == "render_view"


def test_grids_too_large_for_the_kernels_are_left_to_the_general_way():
    def enlarged(field, grid, shape):
        grid.features = nn.Parameter(torch.empty(shape, device="meta"))
        return fastest_backend(field).name

    field = pyramid()
    assert enlarged(field, field.grid.grids[2], (2**9, 2**10, 2**9 * 2 - 1, 4)) == "render_pyramid_image"
    assert enlarged(field, field.grid.grids[2], (2**9, 2**10, 2**9 * 2, 4)) == "render_view"
    field = harmonics()
    assert enlarged(field, field.grid, (2**10, 2**10, 2**10, 28)) == "render_grid_image"
    assert enlarged(field, field.grid, (2**31 - 2, 1, 1, 28)) == "render_grid_image"
    assert enlarged(field, field.grid, (2**31 - 1, 1, 1, 28)) == "render_view"
    field = summed()
    assert enlarged(field, field.grid.grids[2], (2**31 - 2, 1, 1, 28)) == "render_grid_image"
    assert enlarged(field, field.grid.grids[2], (2**31 - 1, 1, 1, 28)) == "render_view"


# --- what is drawn


@every_field
def test_draws_what_render_view_draws(device, make, backend):
    (renderer, general), cameras = both_ways(make(), device), make_cameras(device)
    assert renderer.backend == backend
    for index in range(len(cameras)):
        view = renderer.view(cameras, index)
        assert view.rgb.shape == (HEIGHT, WIDTH, 3)
        expected = general(cameras, index)
        assert (expected.opacity > 0.3).sum() > 50
        assert_views_agree(view, expected, device)


@each_way
@pytest.mark.parametrize("model", ["perspective", "fisheye", ("rational", "fisheye624", "pinhole")])
def test_lenses_bend_rays_alike_in_every_way(device, make, model):
    (renderer, general), cameras = both_ways(make(), device), make_cameras(device)
    terms = torch.tensor([[-0.3, 0.1, 0.02, 0.01, 0.01, -0.02], [0.2, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 6])
    bent = dataclasses.replace(cameras, lens=Lens(model, terms.to(device)))
    for index in range(len(cameras)):
        assert_views_agree(renderer.view(bent, index), general(bent, index), device)
    assert (renderer.view(bent, 0).rgb - renderer.view(cameras, 0).rgb).abs().mean() > 0.01


@pytest.mark.parametrize("min_weight", [0.0, 0.2])
@each_way
def test_settings_hold_for_every_way(device, make, min_weight):
    field, cameras = make(), make_cameras(device)
    settings = RenderSettings(step=0.11, min_transmittance=0.3, min_weight=min_weight)
    renderer, general = both_ways(field, device, settings)
    view, expected = renderer.view(cameras, 0), general(cameras, 0)
    # A ray stops, or keeps a sample, on either side of a threshold that is crossed by rounding.
    off = (view.rgb - expected.rgb).abs().amax(-1) > MAX_ERROR[device.type]
    assert off.double().mean() < 0.03
    assert (view.rgb - make_renderer(field, device).view(cameras, 0).rgb).abs().max() > 0.01


@each_way
def test_any_field_can_be_drawn_the_general_way(device, make):
    renderer = make_renderer(make(), device, backend="render_view", chunk=100)
    assert renderer.backend == "render_view"
    assert renderer.view(make_cameras(device), 0).rgb.shape == (HEIGHT, WIDTH, 3)


def test_copies_that_training_keeps_are_drawn(device):
    # None of its own beside them, and not of the masters, which nothing reads.
    field = pyramid().to(device)
    copies = field.grid.enable_copies(torch.float16 if device.type == "cuda" else torch.float32)
    renderer, cameras = make_renderer(field, device), make_cameras(device)
    before = renderer.view(cameras, 0).rgb
    for copy in copies:
        copy.mul_(0.5)
    assert (renderer.view(cameras, 0).rgb - before).abs().max() > 0.01


def test_precision_is_that_of_the_general_way(device):
    (narrow, general), cameras = both_ways(network(), device, precision=torch.bfloat16), make_cameras(device)
    view, full = narrow.view(cameras, 0), general(cameras, 0)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        expected = general(cameras, 0, chunk=10**6)
    torch.testing.assert_close(view.rgb, expected.rgb, atol=1e-3, rtol=0)
    assert (view.rgb - full.rgb).abs().max() > 1e-4


@each_way
@pytest.mark.parametrize("pixel_averaging", ["linear_light", "encoded"])
def test_a_pixel_is_made_of_the_light_of_its_rays(device, make, pixel_averaging):
    side = 3
    field, occupancy, cameras = make().to(device), make_occupancy(device), make_cameras(device)
    scene, background = (field, occupancy, SETTINGS), background_on(device)
    view = FieldRenderer(*scene, background, supersampling=side, pixel_averaging=pixel_averaging).view(cameras, 1)
    fine = dataclasses.replace(cameras.enlarged(side), across=side)
    rays = FieldRenderer(*scene, torch.zeros_like(background)).view(fine, 1)
    starts = [(row, column) for row in range(side) for column in range(side)]
    rgb, opacity, depth = (
        torch.stack([values[row::side, column::side] for row, column in starts], dim=2).double()
        for values in (rays.rgb, rays.opacity, rays.depth)
    )
    expected = reference.pixel_colors(
        rgb.reshape(-1, 3), opacity.flatten(), background.double(), side**2, pixel_averaging
    ).view(HEIGHT, WIDTH, 3)
    torch.testing.assert_close(view.rgb.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(view.opacity.double(), opacity.mean(2), atol=1e-6, rtol=0)
    mean_depth = (depth * opacity).sum(2) / opacity.sum(2).clamp(min=1e-5)
    torch.testing.assert_close(view.depth.double(), mean_depth, atol=1e-4, rtol=0)
    single_rays = FieldRenderer(*scene, background).view(cameras, 1)
    assert view.rgb.shape == single_rays.rgb.shape
    assert 0.001 < (view.rgb - single_rays.rgb).abs().mean() < 0.2


@each_way
def test_pixels_of_linear_values_are_means_of_pixels(device, make):
    field, occupancy, cameras = make().to(device), make_occupancy(device), make_cameras(device)
    given = field, occupancy, SETTINGS, background_on(device)
    view = FieldRenderer(*given, supersampling=2, pixel_averaging="encoded").view(cameras, 1)
    fine = FieldRenderer(*given).view(dataclasses.replace(cameras.enlarged(2), across=2), 1)
    mean = sum(fine.rgb[row::2, column::2] for row in (0, 1) for column in (0, 1)) / 4
    torch.testing.assert_close(view.rgb, mean, atol=1e-6, rtol=0)


@each_way
@pytest.mark.parametrize("supersampling", [1, 2])
def test_empty_space_shows_the_background(device, make, supersampling):
    field, occupancy = make().to(device), make_occupancy(device, fraction=-1.0)
    renderer = FieldRenderer(field, occupancy, SETTINGS, background_on(device), supersampling=supersampling)
    view = renderer.view(make_cameras(device), 2)
    assert torch.equal(view.rgb, background_on(device).expand(HEIGHT, WIDTH, 3))
    assert not view.opacity.any()
    assert not view.depth.any()


@pytest.mark.cuda
@each_way
def test_cameras_may_be_on_the_host(make):
    device = torch.device("cuda")
    renderer = make_renderer(make(), device)
    view, expected = (renderer.view(make_cameras(where), 1).rgb for where in ("cpu", "cuda"))
    assert view.is_cuda
    torch.testing.assert_close(view, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("supersampling", [1, 2])
@pytest.mark.parametrize("make", [pyramid, harmonics, summed])
def test_nothing_waits_for_the_device(make, supersampling):
    device = torch.device("cuda")
    renderer, cameras = make_renderer(make(), device, supersampling=supersampling), make_cameras(device)
    expected = renderer.view(cameras, 1)
    with never_synchronising():
        view = renderer.view(cameras, 1)
    assert torch.equal(view.rgb, expected.rgb)


# --- mistakes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"background": torch.zeros(4)}, ValueError, r"background must have shape \(3\), got \(4,\)"),
        ({"background": torch.zeros(3).double()}, TypeError, "background must be float32, got float64"),
        ({"background": torch.zeros(3, device="meta")}, ValueError, "background must be on the device of field, cpu"),
        ({"supersampling": 0}, ValueError, "supersampling must be an int of at least 1, got 0"),
        ({"supersampling": 1.5}, ValueError, "supersampling must be an int of at least 1, got 1.5"),
        (
            {"pixel_averaging": "gamma"},
            ValueError,
            r"pixel_averaging must be one of \['linear_light', 'encoded'\], got 'gamma'",
        ),
        ({"chunk": 0}, ValueError, "chunk must be an int of at least 1, got 0"),
        (
            {"backend": "render_pyramid_image"},
            ValueError,
            "backend must be render_grid_image or render_view for this field, or None, got 'render_pyramid_image'",
        ),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    given = {"background": torch.zeros(3), **change}
    with pytest.raises(error, match=message):
        FieldRenderer(harmonics(), make_occupancy("cpu"), SETTINGS, **given)


def test_occupancy_must_be_where_the_field_is():
    occupancy = make_occupancy("cpu").to("meta")
    with pytest.raises(ValueError, match="occupancy must be on the device of field, cpu, but it is on meta"):
        FieldRenderer(harmonics(), occupancy, SETTINGS, torch.zeros(3))


@each_way
@pytest.mark.parametrize("index", [-1, 3])
def test_a_camera_must_exist(make, index):
    renderer = make_renderer(make(), torch.device("cpu"))
    with pytest.raises(IndexError, match=rf"index must lie in \[0, 3\), got {index}"):
        renderer.view(make_cameras("cpu"), index)


# ------------------------------------------------------------------------------------------- a backend of a package


class Flat(ImageBackend):
    """Renders one colour, for fields that say so."""

    name = "render_flat"

    @classmethod
    def serves(cls, field) -> bool:
        return getattr(field, "flat", False)

    @classmethod
    def prepare(cls, source):
        def draw(cameras, index):
            size = (cameras.height, cameras.width)
            return View(source.background.expand(*size, 3), torch.zeros(size), torch.zeros(size))

        return draw


def test_a_backend_of_another_package_serves_its_own_kind_alone():
    field = harmonics()
    occupancy, settings, background = OccupancyGrid(4, field.aabb), RenderSettings(step=0.1), torch.full((3,), 0.25)
    backends = (Flat, *BACKENDS)
    assert FieldRenderer(field, occupancy, settings, background, backends=backends).backend == "render_grid_image"
    field.flat = True
    renderer = FieldRenderer(field, occupancy, settings, background, backends=backends)
    assert renderer.backend == "render_flat"
    cameras = Cameras(torch.eye(4)[None], torch.tensor([[10.0, 10.0, 4.0, 3.0]]), width=8, height=6)
    assert torch.equal(renderer.view(cameras, 0).rgb, background.expand(6, 8, 3))
    with pytest.raises(ValueError, match="backend must be render_flat or render_view for this field"):
        FieldRenderer(field, occupancy, settings, background, backends=backends, backend="render_grid_image")
