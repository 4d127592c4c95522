"""The models of regions, rendered as one field."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from viewer_scene import trained_run
from voxelfield.viewer.display import Display, Viewpoint
from voxelfield.viewer.painter import Painter, content_box

from voxelfield.export import save_model
from voxelfield.regions.divided_model import DividedModel
from voxelfield.regions.division import Cut, Division
from voxelfield.rendering.cameras import Cameras
from voxelfield.training.trained_model import TrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

# Across x, around 0.
DIVISION = Division(Cut(0, -1.0, 1.0), [((-4, -4, -4), (1, 4, 4)), ((-1, -4, -4), (4, 4, 4))])


def upper_half(run: TrainedModel) -> TrainedModel:
    occupancy = copy.deepcopy(run.occupancy)
    occupancy.occupied[:, :, : occupancy.occupied.shape[2] // 2] = False
    return replace(run, model=run.model.around(occupancy=occupancy))


@pytest.fixture(scope="module")
def regions() -> list[TrainedModel]:
    return [trained_run(), upper_half(trained_run())]


@pytest.fixture(scope="module")
def divided(regions) -> DividedModel:
    return DividedModel.of(DIVISION, regions)


def camera_at(x: float, size: int = 24) -> Cameras:
    """Looks at the origin."""
    position = torch.tensor([x, -3.0, 1.5])
    back = torch.nn.functional.normalize(position, dim=0)
    right = torch.nn.functional.normalize(torch.linalg.cross(torch.tensor([0.0, 0.0, 1.0]), back), dim=0)
    c2w = torch.eye(4)
    c2w[:3] = torch.stack((right, torch.linalg.cross(back, right), back, position), dim=-1)
    return Cameras(c2w[None], torch.tensor([[1.2 * size, 1.2 * size, size / 2, size / 2]]), size, size)


def assert_same(first: object, second: object) -> None:
    for name in ("rgb", "opacity", "depth"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=0, atol=0)


def test_the_regions_differ(regions):
    first, second = (region.render(camera_at(0)) for region in regions)
    assert float((first.rgb - second.rgb).abs().mean()) > 0.01


@pytest.mark.parametrize(("x", "number"), [(-1.5, 0), (1.5, 1), (40.0, 1)])
def test_where_one_region_reaches_the_picture_is_its_own_and_others_are_not_asked(divided, regions, x, number):
    renderer = divided.renderer()
    renderer._renderers[1 - number].view = lambda *_: pytest.fail("a region that is not visible was rendered")
    assert_same(renderer.view(camera_at(x), 0), regions[number].render(camera_at(x)))


def test_in_the_overlap_pictures_are_blended(divided, regions):
    camera = camera_at(-0.5)
    share = 0.25**2 * (3 - 2 * 0.25)
    first, second = (region.render(camera) for region in regions)
    blended = divided.render(camera)
    torch.testing.assert_close(blended.rgb, (1 - share) * first.rgb + share * second.rgb)
    opacity = (1 - share) * first.opacity + share * second.opacity
    torch.testing.assert_close(blended.opacity, opacity)
    depth = (1 - share) * first.opacity * first.depth + share * second.opacity * second.depth
    torch.testing.assert_close(blended.depth, depth / opacity.clamp(min=1e-6))


def test_a_path_across_the_border_has_no_jump(divided, regions):
    def step(model: TrainedModel) -> Tensor:
        views = [model.render(camera_at(float(x))).rgb for x in torch.linspace(-1.2, 1.2, 49)]
        return torch.stack([(a - b).abs().mean() for a, b in pairwise(views)]).max()

    apart = (regions[0].render(camera_at(0)).rgb - regions[1].render(camera_at(0)).rgb).abs().mean()
    assert float(step(divided)) < max(float(step(region)) for region in regions) + 0.1 * float(apart)


def test_each_camera_of_a_path_has_its_own_weights(divided, regions):
    path = Cameras(*(torch.cat([getattr(camera_at(x), n) for x in (-2, 2)]) for n in ("c2w", "intrinsics")), 24, 24)
    views = list(divided.render_path(path))
    for view, region, x in zip(views, regions, (-2, 2), strict=True):
        assert_same(view, region.render(camera_at(x)))
    assert_same(next(divided.render_path(camera_at(2))), views[1])


def test_copies_on_other_devices_render_the_same(divided, monkeypatch):
    # Another device without a second one: restoring is what a copy does.
    meta = torch.device("cpu", 0)
    monkeypatch.setattr("voxelfield.training.trained_model.several_devices", lambda first, count: [first, meta])
    _, copy = divided.copies(2)
    assert isinstance(copy, DividedModel)
    assert copy.regions[0].field is not divided.regions[0].field
    assert_same(copy.render(camera_at(-0.5)), divided.render(camera_at(-0.5)))


def test_what_needs_one_field_is_refused(divided, tmp_path):
    message = r"^RUN must be a run with one field, such as that of a region, regions/0, got one of 2 regions$"
    with pytest.raises(ValueError, match=message):
        save_model(tmp_path / "model.safetensors", divided)
    with pytest.raises(ValueError, match=message):
        divided.density(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=message):
        _ = divided.occupancy


@pytest.mark.parametrize("mode", ["rgb", "depth", "occupancy", "samples per ray"])
def test_the_viewer_shows_the_region_around_the_camera(divided, regions, mode):
    camera = camera_at(2.0)
    viewpoint = Viewpoint.of(camera.c2w[0], 0.8)
    for crop in (None, ((-0.5, -0.5, -0.5), (0.5, 0.5, 0.5))):
        display = Display(mode=mode, crop=crop)
        shown = [Painter(run).picture(viewpoint, display, 24, 24) for run in (divided, regions[1])]
        if mode != "depth":  # whose range is that of both regions
            torch.testing.assert_close(*shown, rtol=0, atol=0)
    assert torch.tensor(content_box(divided)).shape == (2, 3)
