"""Marching, selecting, rendering rays and whole views, against fields whose images are known."""

from __future__ import annotations

import math

import pytest
import torch
from rendered_batch import rendered

from voxelfield import VoxelGrid
from voxelfield.fields.decoders import ColorMLPDecoder, DeferredMLPDecoder, FusedMLPDecoder, SHDecoder
from voxelfield.fields.density import DensityActivation, ExponentialDensity
from voxelfield.fields.field import RadianceField
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.models.losses import rendering_terms
from voxelfield.ops import ray_weights
from voxelfield.ops.marching import PackedSamples
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import Capacity, RenderSettings, march, select, visible_samples
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays, intersect_aabb
from voxelfield.rendering.render import Rendering, render, render_view
from voxelfield.settings import LossConfig

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
SIGMA = 1.7
STEP = 2.0 / 64
# Nothing is too faint and no ray stops.
EXACT = RenderSettings(step=STEP, min_transmittance=0.0, min_weight=0.0)


def uniform_field(device, color=(0.2, 0.5, 0.9)):
    """Density SIGMA and one colour everywhere in the box."""
    decoder = SHDecoder(0, DensityActivation(scale=2.0, initial=SIGMA))
    field = RadianceField(VoxelGrid((3, 4, 5), decoder.channels, BOX), decoder)
    basis = 0.5 / math.sqrt(math.pi)
    with torch.no_grad():
        field.grid.features[..., 1:] = torch.logit(torch.tensor(color)) / basis
    return field.to(device)


def random_field(device, kind="sh"):
    density = DensityActivation(scale=5.0, initial=1.0)
    decoder = SHDecoder(1, density) if kind == "sh" else ColorMLPDecoder(6, 16, 1, 1, density)
    return RadianceField(VoxelGrid(8, decoder.channels, BOX, init_std=1.0), decoder).to(device)


def marchable_field(device):
    """A pyramid of the kind that one kernel can march through, full of fog and holes."""
    pyramid = VoxelPyramid((3, 6, 9), 4, BOX, init_range=1.0)
    field = RadianceField(pyramid, FusedMLPDecoder(12, 16, 4, 1, 2, ExponentialDensity(2.0))).to(device)
    field.grid.enable_copies(torch.float16 if device.type == "cuda" else torch.float32)
    return field


def pyramid_field(device):
    pyramid = VoxelPyramid((3, 6, 9), 2, BOX, init_range=1.0)
    return RadianceField(pyramid, FusedMLPDecoder(6, 16, 4, 1, 2, ExponentialDensity(2.0))).to(device)


def deferred_field(device):
    pyramid = VoxelPyramid((3, 6, 9), 2, BOX, init_range=1.0)
    return RadianceField(pyramid, DeferredMLPDecoder(6, 16, 8, 1, 2, ExponentialDensity(2.0))).to(device)


def everywhere(device):
    return OccupancyGrid(4, BOX).to(device)


def nowhere(device):
    occupancy = everywhere(device)
    occupancy.occupied.zero_()
    return occupancy


def aimed_rays(count, device):
    """Rays from outside through random points of the box."""
    origins = 4 * torch.nn.functional.normalize(torch.randn(count, 3), dim=-1)
    directions = torch.nn.functional.normalize(1.4 * torch.rand(count, 3) - 0.7 - origins, dim=-1)
    return Rays(origins, directions, *intersect_aabb(origins, directions, torch.tensor(BOX))).to(device)


def straight_rays(device, count=3):
    """Rays along z through the whole box: from 1 before it, lengths of exactly 2."""
    origins = torch.tensor([[0.1, 0.2, -2.0], [-0.7, 0.3, -2.0], [0.9, -0.9, -2.0]])[:count]
    directions = torch.tensor([[0.0, 0.0, 1.0]]).expand(count, 3)
    return Rays(origins, directions, *intersect_aabb(origins, directions, torch.tensor(BOX))).to(device)


def camera_at(z, width, height, device):
    """One camera on the z axis that looks at the origin, x to the right and y up."""
    c2w = torch.eye(4)[None].clone()
    c2w[0, 2, 3] = z
    focal = 1.5 * height
    return Cameras(c2w, torch.tensor([[focal, focal, width / 2, height / 2]]), width, height).to(device)


def packed(counts, device):
    total = sum(counts)
    ray_index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64))
    ray_offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    return PackedSamples(
        torch.rand(total, 3, device=device),
        torch.rand(total, device=device),
        torch.rand(total, device=device),
        ray_index.to(device),
        ray_offsets.to(device),
        torch.tensor([len(counts)], device=device),
    )


# --- march


def test_march_fills_a_box_with_midpoints(device):
    samples = march(straight_rays(device), everywhere(device), STEP)
    assert samples.ray_offsets.tolist() == [0, 64, 128, 192]
    assert (samples.dt == STEP).all()
    expected = 1 + (torch.arange(64, device=device) + 0.5) * STEP
    torch.testing.assert_close(samples.t.view(3, 64), expected.expand(3, 64))


def test_jitter_shifts_each_ray_by_part_of_a_step(device):
    rays = straight_rays(device, 1)[torch.zeros(500, dtype=torch.int64, device=device)]
    torch.manual_seed(3)
    samples = march(rays, everywhere(device), STEP, jitter=True)
    shift = (samples.t[samples.ray_offsets[:-1]] - rays.near) / STEP
    assert (shift >= 0).all()
    assert (shift <= 1).all()
    # Uniform: mean 1/2 and variance 1/12, within four standard errors.
    assert shift.mean().item() == pytest.approx(0.5, abs=4 / math.sqrt(12 * 500))
    assert shift.var().item() == pytest.approx(1 / 12, rel=0.25)
    torch.manual_seed(3)
    assert torch.equal(march(rays, everywhere(device), STEP, jitter=True).t, samples.t)
    assert not torch.equal(march(rays, everywhere(device), STEP, jitter=True).t, samples.t)


def test_march_through_nothing(device):
    samples = march(straight_rays(device), nowhere(device), STEP)
    assert samples.t.shape == (0,)
    assert samples.ray_offsets.tolist() == [0, 0, 0, 0]
    assert samples.rays_kept.item() == 3


# --- select


@pytest.mark.parametrize("counts", [[3, 0, 5, 1, 0, 40], [0, 0], [], [7]], ids=str)
def test_select_keeps_what_shows_and_the_packing(device, counts):
    samples = packed(counts, device)
    settings = RenderSettings(STEP, min_transmittance=0.2, min_weight=0.03)
    field = random_field(device)
    with torch.no_grad():
        density = field.density(samples.positions)
    weights = ray_weights(density, samples.dt, samples.ray_offsets, min_transmittance=0.2)
    keep = weights > 0.03
    chosen = select(field, samples, settings, rays=aimed_rays(len(counts), device))
    assert len(chosen.t) == int(keep.sum())
    assert len(samples.t) < 20 or 0 < len(chosen.t) < len(samples.t)
    assert chosen.ray_offsets.shape == samples.ray_offsets.shape
    assert chosen.ray_offsets[0] == 0
    for ray, (first, last) in enumerate(zip(samples.ray_offsets[:-1], samples.ray_offsets[1:], strict=True)):
        here = slice(chosen.ray_offsets[ray], chosen.ray_offsets[ray + 1])
        for name in ("positions", "t", "dt", "ray_index"):
            expected = getattr(samples, name)[first:last][keep[first:last]]
            assert torch.equal(getattr(chosen, name)[here], expected), name


# --- render


def test_uniform_box_in_closed_form(device):
    rays = straight_rays(device)
    rendering = render(uniform_field(device), rays, everywhere(device), EXACT)
    opacity = 1 - math.exp(-2 * SIGMA)
    torch.testing.assert_close(rendering.opacity, torch.full((3,), opacity, device=device))
    color = torch.tensor([0.2, 0.5, 0.9], device=device)
    torch.testing.assert_close(rendering.rgb, (opacity * color).expand(3, 3))
    # Integral of t sigma exp(-sigma (t - 1)) over [1, 3]; midpoints miss it by about sigma step^2 / 12.
    depth = 1 + 1 / SIGMA - (3 + 1 / SIGMA) * math.exp(-2 * SIGMA)
    torch.testing.assert_close(
        rendering.depth_sum, torch.full((3,), depth, device=device), rtol=0, atol=SIGMA * STEP**2
    )
    assert (
        rendering.candidates
        == len(rendering.samples.positions)
        == len(rendering.weights)
        == len(rendering.sample_rgb)
        == 192
    )
    torch.testing.assert_close(rendering.weights.view(3, 64).sum(1), rendering.opacity)
    torch.testing.assert_close(rendering.sample_rgb, color.expand(192, 3))


def test_oblique_rays_through_a_uniform_box(device):
    rays = aimed_rays(200, device)
    length = rays.far - rays.near
    assert length.min() < 0.9 * length.max()
    rendering = render(uniform_field(device), rays, everywhere(device), EXACT)
    # The number of midpoints on a ray is its length in steps, rounded.
    low, high = (1 - torch.exp(-SIGMA * (length + slack)) for slack in (-0.501 * STEP, 0.501 * STEP))
    assert ((rendering.opacity >= low) & (rendering.opacity <= high)).all()


def test_depth_of_a_wall(device):
    field = uniform_field(device)
    with torch.no_grad():
        field.grid.features[..., 0] = 1e4
    occupancy = nowhere(device)
    occupancy.occupied[:, :, 2:] = True  # z > 0: rays from z = -2 meet it after 2
    rendering = render(field, straight_rays(device), occupancy, RenderSettings(step=STEP))
    torch.testing.assert_close(rendering.depth_sum / rendering.opacity, torch.full((3,), 2 + STEP / 2, device=device))
    assert rendering.candidates == 96
    assert len(rendering.samples.positions) == 3


def test_empty_space_and_missing_rays_are_transparent(device):
    field = uniform_field(device)
    missing = straight_rays(device)
    missing = Rays(
        missing.origins + 5, missing.directions, torch.zeros_like(missing.near), torch.zeros_like(missing.far)
    )
    for rays, occupancy in ((straight_rays(device), nowhere(device)), (missing, everywhere(device))):
        for settings in (EXACT, RenderSettings(step=STEP)):
            rendering = render(field, rays, occupancy, settings)
            assert rendering.rgb.shape == (3, 3)
            assert not rendering.rgb.any()
            assert not rendering.opacity.any()
            assert not rendering.depth_sum.any()
            assert rendering.candidates == 0
            rendering.rgb.sum().backward()
    assert not field.grid.features.grad.any()


@pytest.mark.parametrize("kind", ["sh", "dense"])
def test_no_rays(device, kind):
    field = random_field(device, kind)
    for settings in (EXACT, RenderSettings(step=STEP)):
        rendering = render(field, aimed_rays(0, device), everywhere(device), settings, jitter=True)
        assert rendering.rgb.shape == (0, 3)
        assert rendering.over(torch.ones(3, device=device)).shape == (0, 3)


def test_jitter_does_not_change_the_image_on_average(device):
    field, rays = uniform_field(device), straight_rays(device, 1)
    many = rays[torch.zeros(300, dtype=torch.int64, device=device)]
    rendering = render(field, many, everywhere(device), EXACT, jitter=True)
    assert rendering.opacity.mean().item() == pytest.approx(1 - math.exp(-2 * SIGMA), abs=1e-3)


@pytest.mark.parametrize("min_weight", [1e-3, 1e-2])
@pytest.mark.parametrize("min_transmittance", [0.0, 1e-2])
def test_dropping_faint_samples_changes_a_pixel_by_no_more_than_their_weights(device, min_weight, min_transmittance):
    # Without the dropped samples, of weight D together, more light passes to those behind; but no more than D of it,
    # for opacity cannot grow. So the pixel loses at most D and gains at most D, per channel. Opacity loses at most D.
    field, rays, occupancy = random_field(device), aimed_rays(300, device), everywhere(device)
    exact = render(field, rays, occupancy, RenderSettings(STEP, min_transmittance, 0.0))
    culled = render(field, rays, occupancy, RenderSettings(STEP, min_transmittance, min_weight))
    faint = exact.weights <= min_weight
    assert 0 < faint.sum() < len(faint)
    assert torch.equal(culled.samples.positions, exact.samples.positions[~faint])
    assert culled.candidates == exact.candidates == len(exact.samples.positions)
    dropped = torch.zeros(300, device=device).index_add_(0, exact.samples.ray_index[faint], exact.weights[faint])
    assert (dropped <= min_weight * torch.bincount(exact.samples.ray_index[faint], minlength=300)).all()
    assert ((culled.rgb - exact.rgb).abs() <= dropped[:, None] + 1e-5).all()
    lost = exact.opacity - culled.opacity
    assert (lost >= -1e-5).all()
    assert (lost <= dropped + 1e-5).all()
    assert not torch.equal(culled.rgb, exact.rgb)


def test_faint_samples_cost_no_colour(device):
    field, rays = random_field(device), aimed_rays(50, device)
    evaluated = []
    rgb = field.decoder.rgb
    field.decoder.rgb = lambda features, view: evaluated.append(len(features)) or rgb(features, view)
    rendering = render(field, rays, everywhere(device), RenderSettings(STEP, min_weight=1e-3))
    assert evaluated == [len(rendering.samples.positions)]
    assert evaluated[0] < rendering.candidates
    assert (rendering.weights > 1e-3).all()


def test_density_gradient_of_a_uniform_box_in_closed_form(device):
    field = uniform_field(device)
    render(field, straight_rays(device, 1), everywhere(device), EXACT).opacity.sum().backward()
    # All vertices together: d opacity / d sigma = L exp(-sigma L), d sigma / d raw = scale sigmoid(shift).
    activation = field.decoder.activation
    expected = 2 * math.exp(-2 * SIGMA) * activation.scale / (1 + math.exp(-activation.shift))
    gradient = field.grid.features.grad
    assert gradient[..., 0].sum().item() == pytest.approx(expected, rel=1e-4)
    assert not gradient[..., 1:].any()


@pytest.mark.parametrize("settings", [EXACT, RenderSettings(step=STEP)], ids=["exact", "culled"])
@pytest.mark.parametrize("kind", ["sh", "dense"])
def test_gradient_reaches_grid_and_decoder(device, kind, settings):
    field = random_field(device, kind)
    target = torch.rand(400, 3).to(device)
    rendering = render(field, aimed_rays(400, device), everywhere(device), settings, jitter=True)
    (rendering.over(torch.ones(3, device=device)) - target).square().sum().backward()
    for name, parameter in field.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    assert field.grid.features.grad.flatten(0, 2).any(dim=0).all()


def test_gradient_agrees_with_finite_differences(device):
    field, rays = random_field(device), aimed_rays(30, device)
    target = torch.rand(30, 3).to(device)
    direction = torch.randn(field.grid.features.shape).to(device)

    def loss():
        return (render(field, rays, everywhere(device), EXACT).rgb - target).double().square().sum()

    loss().backward()
    slope = (field.grid.features.grad * direction).sum().item()
    values = []
    with torch.no_grad():
        for shift in (1e-2, -2e-2):
            field.grid.features += shift * direction
            values.append(loss().item())
    assert slope == pytest.approx((values[0] - values[1]) / 2e-2, rel=2e-2)


def test_render_under_autocast(device):
    field, rays = random_field(device, "dense"), aimed_rays(50, device)
    exact = render(field, rays, everywhere(device), EXACT)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        rendering = render(field, rays, everywhere(device), EXACT)
    assert rendering.rgb.dtype == rendering.opacity.dtype == torch.float32
    torch.testing.assert_close(rendering.opacity, exact.opacity)
    torch.testing.assert_close(rendering.rgb, exact.rgb, rtol=0, atol=0.02)


def test_over_a_background(device):
    samples = packed([0, 0], device)
    none, number = torch.zeros(0, device=device), torch.tensor(0, device=device)
    rgb = torch.tensor([[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]], device=device)
    opacity = torch.tensor([0.75, 0.0], device=device)
    rendering = Rendering(rgb, opacity, opacity, samples, none, none, none, number, number)
    one = torch.tensor([1.0, 0.0, 0.4], device=device)
    expected = torch.tensor([[0.35, 0.2, 0.4], [1.0, 0.0, 0.4]], device=device)
    torch.testing.assert_close(rendering.over(one), expected)
    each = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.6, 0.7]], device=device)
    torch.testing.assert_close(rendering.over(each), torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.6, 0.7]], device=device))


# --- in one kernel, where the field allows it


def test_a_pyramid_shows_the_same_samples_whichever_way_they_are_found(device, monkeypatch):
    field, rays = marchable_field(device), aimed_rays(100, device)
    occupied = torch.rand(5, 6, 7, device=device) < 0.8
    occupancy = OccupancyGrid((5, 6, 7), BOX).to(device)
    occupancy.occupied.copy_(occupied)
    settings = RenderSettings(STEP, min_weight=1e-2)
    one, candidates = visible_samples(field, rays, occupancy, settings)
    assert candidates is None
    monkeypatch.setattr(RadianceField, "pyramid_density", lambda self: None)
    other, candidates = visible_samples(field, rays, occupancy, settings)
    assert candidates is not None
    assert 100 < len(other.t) < 0.95 * int(candidates)
    # Densities are rounded differently: of samples that hardly show, one or the other is left out.
    mine, theirs = ({(int(r), float(t)) for r, t in zip(p.ray_index, p.t, strict=True)} for p in (one, other))
    assert len(mine ^ theirs) <= 0.02 * len(theirs)


def test_only_some_fields_can_be_marched_through_in_one_kernel():
    assert marchable_field(torch.device("cpu")).pyramid_density() is not None
    for pyramid, decoder in (
        (VoxelPyramid((3, 6), 2, BOX), FusedMLPDecoder(4, 16, 4, 1, 2, ExponentialDensity(2.0))),
        (VoxelPyramid((3, 6), 4, BOX, reduce="sum"), FusedMLPDecoder(4, 16, 4, 1, 2, ExponentialDensity(2.0))),
        (VoxelPyramid((3, 6), 4, BOX), FusedMLPDecoder(8, 16, 17, 1, 2, ExponentialDensity(2.0))),
        (VoxelPyramid((3, 6), 4, BOX), FusedMLPDecoder(8, 16, 4, 1, 2, DensityActivation(1.0, 0.1))),
    ):
        assert RadianceField(pyramid, decoder).pyramid_density() is None
    assert random_field(torch.device("cpu")).pyramid_density() is None


def test_a_field_with_a_density_of_its_own_is_marched_by_it(device):
    class Hollow(RadianceField):
        def density(self, points):
            return super().density(points) * (points.norm(dim=-1) > 0.5)

    field = marchable_field(device)
    hollow = Hollow(field.grid, field.decoder)
    assert hollow.pyramid_density() is None
    packed, _ = visible_samples(hollow, aimed_rays(50, device), everywhere(device), RenderSettings(STEP))
    assert len(packed.t) > 100
    assert (packed.positions.norm(dim=-1) > 0.499).all()


def test_faint_samples_are_kept_at_random_in_training_alone(device):
    field, rays = marchable_field(device), aimed_rays(200, device)
    settings = RenderSettings(STEP, min_weight=0.0, roulette=0.2)
    room = Capacity(100_000, 100_000)
    every, _ = visible_samples(field, rays, everywhere(device), settings, capacity=room)
    assert (every.dt[: every.ray_offsets[-1]] == STEP).all()
    some, _ = visible_samples(field, rays, everywhere(device), settings, jitter=True, capacity=room)
    assert 100 < int(some.ray_offsets[-1]) < 0.8 * int(every.ray_offsets[-1])
    assert (some.dt[: some.ray_offsets[-1]] > 1.5 * STEP).any()
    without_room, _ = visible_samples(field, rays, everywhere(device), settings, jitter=True)
    assert (without_room.dt > 1.5 * STEP).any()
    other, _ = visible_samples(random_field(device), rays, everywhere(device), settings, jitter=True, capacity=room)
    assert (other.dt[: other.ray_offsets[-1]] == STEP).all()
    with pytest.raises(ValueError, match=r"^roulette must "):
        RenderSettings(STEP, roulette=1.5)


def test_levels_that_are_off_leave_the_density_alone(device):
    field = marchable_field(device)
    points = 2 * torch.rand(50, 3, device=device) - 1
    field.grid.activate(6)
    field.grid.enable_copies(torch.float16 if device.type == "cuda" else torch.float32)
    density = field.pyramid_density()
    assert [len(density.levels), density.density_weights[0].shape] == [2, (16, 8)]
    features = field.grid(points)[:, :8].float()
    raw = torch.relu(features @ density.density_weights[0].T) @ density.density_weights[1].T
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if device.type == "cuda" else {}
    torch.testing.assert_close(density.density_initial * raw[:, 0].exp(), field.density(points), **tolerance)


# --- with a limited capacity for samples


@pytest.mark.parametrize("make", [random_field, pyramid_field, deferred_field])
@pytest.mark.parametrize("min_weight", [0.0, 1e-3])
def test_room_to_spare_changes_nothing(device, make, min_weight):
    field, rays, settings = make(device), aimed_rays(100, device), RenderSettings(STEP, min_weight=min_weight)
    grads, renderings = [], []
    for capacity in (None, Capacity(candidates=100 * 150, visible=100 * 140)):
        rendering = render(field, rays, everywhere(device), settings, capacity=capacity)
        (rendering.rgb.square().sum() + rendering.depth_sum.sum()).backward()
        grads.append([parameter.grad.clone() for parameter in field.parameters()])
        field.zero_grad()
        renderings.append(rendering)
    exact, roomy = renderings
    assert len(exact.samples.positions) < len(roomy.samples.positions)
    assert torch.equal(exact.samples.ray_offsets, roomy.samples.ray_offsets)
    assert exact.candidates == roomy.candidates
    assert exact.rays_kept == roomy.rays_kept == 100
    for name in ("rgb", "opacity", "depth_sum"):
        torch.testing.assert_close(getattr(roomy, name), getattr(exact, name), msg=name)
    # On CUDA networks and sums of gradients work in other orders.
    tolerance = {} if device.type == "cpu" else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(*grads, **tolerance)


@pytest.mark.parametrize(
    ("make", "min_weight"), [(random_field, 1e-3), (marchable_field, 1e-3), (deferred_field, 1e-3)]
)
def test_a_capacity_compiles_as_one_graph(device, make, min_weight):
    torch.compiler.reset()
    field, rays, occupancy = make(device), aimed_rays(50, device), everywhere(device)
    if make is marchable_field:
        field.grid.activate(9)  # reads features instead of copies, as the graph does
    settings, room = RenderSettings(STEP, min_weight=min_weight), Capacity(candidates=8000, visible=8000)

    def pixels(origins, directions, near, far):
        rendering = render(field, Rays(origins, directions, near, far), occupancy, settings, capacity=room)
        return torch.cat([rendering.rgb, rendering.opacity[:, None], rendering.depth_sum[:, None]], dim=-1)

    compiled = torch.compile(pixels, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        results = []
        for function in (pixels, compiled):
            field.zero_grad()
            values = function(rays.origins, rays.directions, rays.near, rays.far)
            values.square().sum().backward()
            results.append([values.detach(), *(parameter.grad for parameter in field.parameters())])
        assert results[0][0].abs().sum() > 0
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
        occupancy.occupied[:2] = False  # the graph must see this


@pytest.mark.parametrize("make", [random_field, pyramid_field, deferred_field])
@pytest.mark.parametrize("narrow", ["candidates", "visible"])
def test_rays_without_room_show_nothing_and_are_reported(device, make, narrow):
    field, rays, settings = make(device), aimed_rays(100, device), RenderSettings(STEP)
    exact = render(field, rays, everywhere(device), settings)
    all_samples = int(exact.candidates if narrow == "candidates" else exact.samples.ray_offsets[-1])
    room = Capacity(**{"candidates": 15000, "visible": 15000, narrow: all_samples // 2})
    rendering = render(field, rays, everywhere(device), settings, capacity=room)
    rays_kept = int(rendering.rays_kept)
    assert 30 < rays_kept < 70
    assert rendering.samples.ray_offsets[-1] <= room.visible
    assert rendering.weights.shape == (room.visible,)
    for name in ("rgb", "opacity", "depth_sum"):
        torch.testing.assert_close(getattr(rendering, name)[:rays_kept], getattr(exact, name)[:rays_kept], msg=name)
        assert not getattr(rendering, name)[rays_kept:].any()
    assert not rendering.weights[int(rendering.samples.ray_offsets[-1]) :].any()


@pytest.mark.parametrize("make", [random_field, pyramid_field, deferred_field])
def test_losses_of_the_rays_that_were_taken(device, make):
    field, rays, settings = make(device), aimed_rays(60, device), RenderSettings(STEP)
    config = LossConfig(sample_rgb=1.0, distortion=0.0, opacity_entropy=1.0, sparsity=1.0)
    truth, background = torch.rand(60, 3).to(device), torch.rand(60, 3).to(device)
    part = render(field, rays, everywhere(device), settings, capacity=Capacity(2000, 2000))
    rays_kept = int(part.rays_kept)
    assert 0 < rays_kept < 60
    alone = render(field, rays[:rays_kept], everywhere(device), settings)
    terms = rendering_terms(config).losses(*rendered(part, part.over(background), truth))
    expected = rendering_terms(config).losses(*rendered(alone, alone.over(background[:rays_kept]), truth[:rays_kept]))
    for name, term in expected.items():
        torch.testing.assert_close(terms[name], term, rtol=1e-4, atol=1e-6, msg=name)


# --- whole views


def test_view_does_not_depend_on_the_chunk(device):
    field, cameras = random_field(device), camera_at(3.0, 11, 7, device)
    background = torch.tensor([0.3, 0.6, 0.9], device=device)

    def view(chunk):
        return render_view(field, cameras, 0, everywhere(device), RenderSettings(STEP), background, chunk)

    whole = view(1000)
    assert whole.rgb.shape == (7, 11, 3)
    assert whole.opacity.shape == whole.depth.shape == (7, 11)
    assert not whole.rgb.requires_grad
    assert whole.rgb.device.type == device.type
    for chunk in (1, 10, 77):
        part = view(chunk)
        for name in ("rgb", "opacity", "depth"):
            torch.testing.assert_close(getattr(part, name), getattr(whole, name), msg=f"{name}, chunk {chunk}")


def test_view_shows_things_where_they_are(device):
    # Only the corner x < 0, y > 0 is filled: left and up for a camera that looks along -z.
    occupancy = nowhere(device)
    occupancy.occupied[:2, 2:, :] = True
    background = torch.tensor([0.3, 0.6, 0.9], device=device)
    cameras = camera_at(5.0, 12, 8, device)
    view = render_view(uniform_field(device), cameras, 0, occupancy, RenderSettings(STEP), background, 50)
    filled = torch.zeros(8, 12, dtype=torch.bool, device=device)
    # The box's near face is 4 away and reaches 1 to the side: 1.5 * 8 / 4 = 3 pixels from the middle, at most.
    filled[1:4, 3:6] = True
    assert (view.opacity[filled] > 0.5).all()
    assert (view.opacity[~filled] == 0).all()
    assert (view.rgb[~filled] == background).all()
    assert (view.depth[~filled] == 0).all()
    assert ((view.depth[filled] > 4) & (view.depth[filled] < 6.3)).all()
    color = torch.tensor([0.2, 0.5, 0.9], device=device)
    opacity = view.opacity[..., None]
    torch.testing.assert_close(view.rgb, opacity * color + (1 - opacity) * background)
