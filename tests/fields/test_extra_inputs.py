"""Decoders and fields that depend on more than features and directions: on positions and on values of rays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from voxelfield import Decoder, FieldRenderer, OccupancyGrid, Rays, RenderSettings, VoxelGrid
from voxelfield.fields.field import RadianceField
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import Capacity
from voxelfield.rendering.render import render
from voxelfield.warps.nested_boxes import NestedBoxes

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
SETTINGS = RenderSettings(step=0.05)


class TimedDecoder(Decoder):
    """Density that begins at x < time, and colours that show all inputs."""

    channels = 1
    density_is_monotonic = True
    extra_inputs = ("position", "time", "image")
    optional_inputs = ("image",)
    density_inputs = ("position", "time")

    def density(self, features, *, position, time=None):
        time = torch.ones_like(position[:, 0]) if time is None else time
        return 50.0 * (position[:, 0] < time) + 0 * features[:, 0]

    def forward(self, features, directions, ray_index, *, position, time, image=None):
        rows = time[ray_index]
        shade = torch.zeros_like(rows) if image is None else image[ray_index].float() / 10
        return self.density(features, position=position, time=rows), torch.stack((rows, shade, rows), dim=1)


def make_field(device, warp=None):
    box = BOX if warp is None else warp.warped_aabb
    return RadianceField(VoxelGrid(4, 1, box), TimedDecoder(), warp).to(device)


def make_rays(count, device, **values):
    origins = torch.tensor([-3.0, 0.0, 0.0]).expand(count, 3).contiguous()
    directions = torch.tensor([1.0, 0.0, 0.0]).expand(count, 3).contiguous()
    return Rays(origins, directions, torch.full((count,), 2.0), torch.full((count,), 4.0), values=values).to(device)


@pytest.mark.parametrize("capacity", [None, Capacity(400, 400)])
def test_values_of_rays_reach_density_and_colour(device, capacity):
    field, occupancy = make_field(device), OccupancyGrid(4, BOX).to(device)
    times = torch.tensor([-0.5, 0.0, -2.0, 0.5])
    rays = make_rays(4, device, time=times, image=torch.arange(4))
    rendering = render(field, rays, occupancy, SETTINGS, capacity=capacity)
    samples = rendering.samples
    used = int(samples.ray_offsets[-1])
    assert used > 0
    assert (samples.positions[:used, 0] < times.to(device)[samples.ray_index[:used]]).all()
    assert torch.equal(rendering.opacity > 0.5, times.to(device) > -1), "the third ray sees nothing at its time"
    expected = torch.stack((times, torch.arange(4) / 10, times), dim=1).to(device) * rendering.opacity[:, None]
    torch.testing.assert_close(rendering.rgb, expected)


def test_a_missing_value_is_named_unless_it_is_optional(device):
    field, occupancy = make_field(device), OccupancyGrid(4, BOX).to(device)
    with pytest.raises(ValueError, match=r"Rays.values must contain 'time', .* got 'image': .*Cameras.with_values"):
        render(field, make_rays(2, device, image=torch.arange(2)), occupancy, SETTINGS)
    without_image = render(field, make_rays(2, device, time=torch.zeros(2)), occupancy, SETTINGS)
    assert (without_image.rgb[:, 1] == 0).all()


def test_directions_with_gradients_leave_values_with_their_rays(device):
    field, occupancy = make_field(device), OccupancyGrid(4, BOX).to(device)
    rays = make_rays(2, device, time=torch.tensor([0.5, -0.5]), image=torch.arange(2))
    plain = render(field, rays, occupancy, SETTINGS)
    moved = render(field, replace(rays, directions=rays.directions.clone().requires_grad_()), occupancy, SETTINGS)
    torch.testing.assert_close(moved.rgb, plain.rgb)


def test_densities_away_from_rays_use_defaults(device):
    field = make_field(device)
    points = torch.rand(20, 3, device=device) - 0.5
    assert (field.density(points) == 50).all()
    assert (field.density(points, time=torch.full_like(points[:, 0], -1)) == 0).all()
    assert field.vertex_density() is None, "vertices do not bound a density of positions"
    density, rgb = field(points, points, time=points[:, 1])
    assert torch.equal(density > 0, points[:, 0] < points[:, 1])
    assert torch.equal(rgb[:, 0], points[:, 1])


def test_positions_are_those_in_the_warp(device):
    boxes = NestedBoxes(BOX, 3)
    field = make_field(device, boxes)
    points = torch.tensor([[3.0, 0.0, 0.0]], device=device)
    warped, _ = boxes.from_world(points)
    just_below, just_above = (warped[:, 0] + offset for offset in (-1e-3, 1e-3))
    assert field.density(points, time=just_below) == 0
    assert field.density(points, time=just_above) > 0


def test_cameras_carry_values_to_views(device):
    pose = torch.eye(4)
    pose[2, 3] = 3.0
    cameras = Cameras(pose.repeat(3, 1, 1), torch.full((3, 4), 4.0), 8, 8).to(device)
    timed = cameras.with_values(time=torch.tensor([-2.0, 0.5, 2.0]), image=7)
    assert timed.values["image"].dtype == torch.int64, "as in training"
    renderer = FieldRenderer(
        make_field(device), OccupancyGrid(4, BOX).to(device), SETTINGS, torch.zeros(3, device=device)
    )
    assert renderer.backend == "render_view"
    assert renderer.view(timed, 0).opacity.max() == 0
    view = renderer.view(timed[1:].enlarged(2), 0)
    torch.testing.assert_close(view.rgb[8, 4], torch.tensor([0.5, 0.7, 0.5], device=device), atol=1e-3, rtol=0)
    with pytest.raises(ValueError, match="must contain 'time'"):
        renderer.view(cameras, 0)
    with pytest.raises(ValueError, match=r"Cameras.values\['time'\] must have shape \(3, ...\), got \(2,\)"):
        cameras.with_values(time=torch.zeros(2))
