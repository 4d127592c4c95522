"""Colours of directions beyond the field: the module, pictures, and bricks under a sky, trained, saved and loaded."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from baked_fields import SETTINGS, half_empty, look_at, make_field
from PIL import Image
from sky_scene import bricks_under_sky
from small_pyramid import settings
from small_sessions import fitted, restored

import voxelfield
from voxelfield import FieldRenderer, RadianceField, VoxelGrid
from voxelfield.cli.command import main
from voxelfield.components.environment import choose_environment
from voxelfield.components.exposure import AffineExposure
from voxelfield.components.refinement import refine_views
from voxelfield.evaluation.evaluation import evaluate_split
from voxelfield.export import save_model
from voxelfield.fields.decoders import SHDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.fields.environment import Environment
from voxelfield.rendering.render import render
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.training.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 160
MAP, NONE = "model.environment=map", "model.environment=none"


def random_environment(device: torch.device) -> Environment:
    environment = Environment(device)
    with torch.no_grad():
        for each in environment.maps:
            each.normal_()
    return environment


def towards(azimuth: float, elevation: float) -> torch.Tensor:
    """A direction (1, 3), degrees."""
    a, e = math.radians(azimuth), math.radians(elevation)
    return torch.tensor([[math.cos(e) * math.cos(a), math.cos(e) * math.sin(a), math.sin(e)]])


# ---------------------------------------------------------------------------------------------------- the module


@pytest.mark.parametrize(
    ("azimuth", "elevation", "row", "column"), [(0, 0, 0.5, 0.5), (-90, 0, 0.5, 0.75), (90, 60, 1 / 6, 0.25)]
)
def test_the_panorama_looks_along_x_with_z_up(device, azimuth, elevation, row, column):
    environment = Environment(device)
    with torch.no_grad():
        rows, columns = environment.maps[2].shape[:2]
        environment.maps[2][int(row * rows) - 1 : int(row * rows) + 2, int(column * columns) - 1 :, :, 0][:, :3] = 9.0
    red, green, _ = environment(3 * towards(azimuth, elevation).to(device))[0].tolist()
    assert red > 0.99
    assert green == 0.5
    assert environment(towards(azimuth + 5, elevation).to(device))[0, 0] == 0.5
    image = environment.panorama()
    assert image.shape == (128, 256, 3)
    assert image[int(128 * row), int(256 * column), 0] > 0.9


def test_the_panorama_has_no_seam_and_no_gap_at_the_poles(device):
    environment = random_environment(device)
    here, there = (environment(towards(azimuth, 20).to(device)) for azimuth in (179.999, -179.999))
    torch.testing.assert_close(here, there, atol=1e-3, rtol=0)
    poles = torch.tensor([[0.0, 0, 1], [0, 0, -1], [1e-9, 0, 1]], device=device, requires_grad=True)
    environment(poles).sum().backward()
    assert poles.grad.isfinite().all()


def test_gradients_are_those_of_differences(device):
    environment, step = random_environment(device).double(), 1e-6
    directions = torch.randn(20, 3, dtype=torch.float64, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(environment(directions).sum(), directions)
    for axis in range(3):
        offset = step * torch.eye(3, dtype=torch.float64, device=device)[axis]
        slope = (environment(directions + offset) - environment(directions - offset)).sum(dim=1) / (2 * step)
        torch.testing.assert_close(gradient[:, axis], slope, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("supersampling", [1, 2])
@pytest.mark.parametrize("kind", ["render_view", "render_grid_image", "render_baked_image"])
def test_every_backend_shows_the_environment_through_what_is_not_opaque(device, kind, supersampling):
    if kind == "render_grid_image":
        grid = VoxelGrid(8, 13, ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0)), init_std=1.0)
        field = RadianceField(grid, SHDecoder(1, DensityActivation(scale=10.0, initial=0.5))).to(device)
    else:
        field = make_field(device, None)
    occupancy, environment, cameras = half_empty(field), random_environment(device), look_at(device)
    arguments = field, occupancy, SETTINGS
    options = {"supersampling": supersampling, "backend": kind, "pixel_averaging": "encoded"}
    black = FieldRenderer(*arguments, torch.zeros(3, device=device), **options).view(cameras, 1)
    shown = FieldRenderer(*arguments, environment, **options).view(cameras, 1)
    assert 0.05 < black.opacity.mean() < 0.95, "the test shows nothing"
    behind = environment(cameras.image_rays(1, field.aabb).directions).view(black.rgb.shape)
    torch.testing.assert_close(shown.rgb, black.rgb + (1 - black.opacity[..., None]) * behind)
    assert torch.equal(shown.opacity, black.opacity)


def test_an_image_is_drawn_in_bands(device):
    class Counting(Environment):
        def forward(self, directions):
            drawn.append(len(directions))
            return super().forward(directions)

    drawn: list[int] = []
    field, cameras = make_field(device, None), look_at(device)
    environment = Counting(device=device)
    environment.load_state_dict(random_environment(device).state_dict())
    width, height = cameras.size(1)
    arguments = field, half_empty(field), SETTINGS, environment
    whole = FieldRenderer(*arguments).view(cameras, 1)
    bands = FieldRenderer(*arguments, chunk=3 * width).view(cameras, 1)
    torch.testing.assert_close(bands.rgb, whole.rgb)
    assert drawn == [width * height] + [3 * width] * (height // 3) + [width * (height % 3)] * (height % 3 > 0)


# ---------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def scene():
    return bricks_under_sky(40, 25)


@pytest.fixture(scope="module")
def trained(scene, tmp_path_factory) -> Session:
    return fitted(Session(scene, settings(f"trainer.steps={STEPS}", MAP), output=tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def well_trained(scene) -> Session:
    return fitted(Session(scene, settings(f"trainer.steps={4 * STEPS}", MAP)))


@pytest.mark.slow
def test_a_sky_is_drawn_better_by_a_map_of_directions(scene, well_trained):
    without = fitted(Session(scene, settings(f"trainer.steps={4 * STEPS}", NONE)))
    found, before = well_trained.evaluate(progress=False).psnr, without.evaluate(progress=False).psnr
    assert found > before + 2, (found, before)  # dB
    assert well_trained.model.renderer().view(scene.test.cameras, 0).opacity.min() < 0.2


def test_a_map_is_chosen_where_photographs_agree_on_directions(scene, trained, caplog):
    sharp = scene.train.images.clone()
    sharp[..., :3].random_()
    with caplog.at_level(logging.INFO):
        for images, chosen in ((scene.train.images, "map"), (sharp, "none")):
            shown = replace(scene, splits={"train": replace(scene.train, images=images)})
            assert Session(shown, settings()).config.model.environment == chosen
    assert caplog.text.count("of all pixels depend on their direction alone") == 1
    assert choose_environment(replace(scene, bounded=True), None) == "none"
    assert Session(scene, settings("trainer.background=white")).model.environment is None


def test_gradients_reach_the_map_through_what_the_field_lets_pass(scene):
    session = Session(scene, settings(MAP))
    rays = scene.train.cameras.image_rays(0, session.field.aabb)
    seen = render(session.field, rays, session.occupancy, session.model.settings)
    behind = session.model.environment(rays.directions)
    behind.retain_grad()
    seen.over(behind).sum().backward()
    torch.testing.assert_close(behind.grad, (1 - seen.opacity.detach())[:, None].expand(-1, 3))
    before = session.model.environment.maps[2].detach().clone()
    session.train_step()
    assert not torch.equal(before, session.model.environment.maps[2])


def test_the_map_is_saved_resumed_and_loaded(scene, trained, tmp_path):
    view = trained.model.renderer().view(scene.test.cameras, 0)
    loaded = voxelfield.load(trained.output, "cpu")
    torch.testing.assert_close(loaded.render(scene.test.cameras).rgb, view.rgb)
    save_model(tmp_path / "model.safetensors", trained.result(), quality="exact")
    stored = voxelfield.load(tmp_path / "model.safetensors", "cpu")
    torch.testing.assert_close(stored.render(scene.test.cameras).rgb, view.rgb, atol=0.02, rtol=0)
    torch.testing.assert_close([*trained.model.environment.maps], [*stored.model.environment.maps], rtol=0, atol=0)
    again = restored(Session(scene, settings(f"trainer.steps={STEPS}", MAP)), trained.output)
    assert torch.equal(again.renderer().view(scene.test.cameras, 0).rgb, view.rgb)
    plain = Session(scene, settings(f"trainer.steps={STEPS}", NONE))
    with pytest.raises(ValueError, match=r"model\.environment must be map, as in the checkpoint, got none"):
        plain.restore(load_checkpoint(trained.output))


@pytest.mark.slow
def test_poses_of_views_are_refined_before_the_map(scene, well_trained):
    moved = scene.test.cameras.c2w.clone()
    moved[:, :3, 3] += 0.04
    split = replace(scene.test, cameras=replace(scene.test.cameras, c2w=moved))
    before = [each.detach().clone() for each in well_trained.model.environment.maps]
    refined = refine_views(well_trained.model, well_trained.config.trainer, split, steps=60, rate=3e-3)
    for maps in zip(before, well_trained.model.environment.maps, strict=True):
        assert torch.equal(*maps)
    # Not the poses: in so few pixels, a turn does what a shift does.
    view, background = well_trained.renderer().view, well_trained.model.background
    given, found = (evaluate_split(view, views, background, progress=False).psnr for views in (split, refined))
    assert found > given + 2, (found, given)  # dB


def test_exposures_apply_to_what_the_cameras_captured(scene):
    session = Session(scene, settings(MAP, "trainer.exposure=affine"))
    with torch.no_grad():
        session.component(AffineExposure).offset[0] = 1.0
    session.train_step()
    directions = session._state.training_step.batch.rays.directions
    plain = session.model.environment(directions)
    assert not torch.allclose(session._state.training_step.batch.background, plain, atol=0.01)


# ---------------------------------------------------------------------------------------------------- files, refusals


def test_the_panorama_is_exported(trained, tmp_path):
    save_model(tmp_path / "a.safetensors", trained.result())
    command = ["export", str(tmp_path / "a.safetensors"), "--device", "cpu"]
    assert main([*command, "--environment", str(tmp_path / "sky.png")]) == 0
    written = torch.from_numpy(np.array(Image.open(tmp_path / "sky.png"))).float() / 255
    torch.testing.assert_close(written, trained.model.environment.panorama(), atol=0.5 / 255 + 1e-6, rtol=0)


def test_what_would_lose_or_ignore_the_map_is_refused(trained, tmp_path, caplog):
    save_model(tmp_path / "a.safetensors", trained.result())
    command = ["export", str(tmp_path / "a.safetensors"), "--device", "cpu"]
    assert main([*command, "--splats", str(tmp_path / "a.ply")]) == 2
    assert "--splats must come with --environment for this run" in caplog.text
    with pytest.raises(ValueError, match=r"trainer\.background must be random with model\.environment=map"):
        settings(MAP, "trainer.background=white")
    with pytest.raises(ValueError, match=r"model\.environment must be none for images of an object without its back"):
        Session(voxelfield.load_scene("bricks", image_size=25), settings(MAP))
