"""Vignetting and response of cameras: what the module computes, and bricks photographed by such cameras."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quick_presets import preset
from sky_scene import bricks_under_sky
from small_sessions import fitted, restored
from toned_scene import EXPONENTS, turned, two_cameras, vignetted
from torch import Tensor

import voxelfield
from voxelfield.components.exposure import AffineExposure, CameraTones, distinct
from voxelfield.datasets.scene import Scene
from voxelfield.models.batch import Batch
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.render import View
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.trained.model_file import save_model
from voxelfield.training.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")

BOTH = ("trainer.vignetting=true", "trainer.response=true")


def cameras() -> Cameras:
    """Three views, of which the first and the last are of one camera."""
    intrinsics = torch.tensor([[20.0, 20.0, 4.0, 4.5], [20.0, 20.0, 2.5, 3.5], [20.0, 20.0, 4.0, 4.5]])
    sizes = torch.tensor([[9, 7], [5, 7], [9, 7]])
    return Cameras(torch.eye(4).repeat(3, 1, 1), intrinsics, 9, 7, sizes=sizes)


def untrained(dtype: torch.dtype = torch.float32) -> CameraTones:
    views = cameras()
    return CameraTones(distinct(views), views, vignetting=True, response=True).to(dtype)


def learned(dtype: torch.dtype = torch.float32) -> CameraTones:
    """A module that has learned something."""
    tones = untrained(dtype)
    assert tones.falloff is not None
    assert tones.log_slopes is not None
    torch.nn.init.normal_(tones.falloff, -0.2, 0.2)
    torch.nn.init.normal_(tones.log_slopes, 0.3, 0.4)
    return tones


def somewhere(count: int) -> tuple[Tensor, Tensor]:
    """Places (count, 2) and views (count,) of rays."""
    return torch.rand(count, 2) * torch.tensor([5.0, 7.0]), torch.arange(count) % 3


# ---------------------------------------------------------------------------------------------------- the module


def test_before_training_nothing_changes_to_the_bit(device):
    tones, (places, views) = untrained().to(device), (each.to(device) for each in somewhere(12))
    rgb, opacity = torch.rand(12, 3, device=device), torch.rand(12, device=device)
    assert torch.equal(tones(rgb, opacity, places, views), rgb)
    assert tones.penalty() == 0


def test_photographs_of_one_camera_share_its_tones():
    tones = untrained()
    assert tones.known.shape == (2, 6)
    assert tones.camera[0] == tones.camera[2] != tones.camera[1]


def test_rays_are_darkened_and_mapped_as_their_camera_does(device):
    tones, (places, views) = learned().to(device), (each.to(device) for each in somewhere(12))
    opacity = torch.rand(12, device=device)
    rgb = opacity[:, None] * torch.rand(12, 3, device=device)
    shown, given = tones(rgb, opacity, places, views), cameras()
    slopes = (tones.log_slopes - tones.log_slopes.mean(dim=0)).exp().detach().cpu()
    for ray in range(12):
        view = int(views[ray])
        camera = int(tones.camera[view])
        off = places[ray].cpu() - given.intrinsics[view, 2:]
        r = off.norm() / (torch.tensor(given.size(view)).float().norm() / 2)
        factor = tones.falloff[camera].detach().cpu() @ r ** torch.tensor([2.0, 4.0, 6.0])
        for channel in range(3):
            straight = float(rgb[ray, channel] / opacity[ray]) * factor.exp()
            within = (straight * 8 - torch.arange(8)).clamp(min=0)
            within[:7].clamp_(max=1)  # the last piece goes on
            expected = opacity[ray].cpu() * (slopes[camera, channel] * within).sum() / 8
            torch.testing.assert_close(shown[ray, channel].cpu(), expected, atol=1e-5, rtol=1e-5)


def test_the_rays_of_a_pixel_have_its_place():
    tones, (places, views) = learned(), somewhere(6)
    rgb, opacity = torch.rand(12, 3), torch.ones(12)
    each = tones(rgb, opacity, places.repeat_interleave(2, dim=0), views.repeat_interleave(2))
    assert torch.equal(tones(rgb, opacity, places, views), each)
    assert tones(rgb[:0], opacity[:0], places[:0], views[:0]).shape == (0, 3)


def test_gradients_are_those_of_finite_differences():
    tones, (places, views) = learned(torch.float64), somewhere(8)
    opacity = 0.2 + 0.8 * torch.rand(8, dtype=torch.float64)
    rgb = (0.1 + 0.8 * torch.rand(8, 3, dtype=torch.float64)) * opacity[:, None]

    def run(rgb: Tensor, opacity: Tensor, falloff: Tensor, log_slopes: Tensor) -> Tensor:
        values = {"falloff": falloff, "log_slopes": log_slopes}
        return torch.func.functional_call(tones, values, (rgb, opacity, places.double(), views))

    inputs = (rgb.requires_grad_(), opacity.requires_grad_(), tones.falloff, tones.log_slopes)
    assert torch.autograd.gradcheck(run, inputs)


def test_a_view_is_shown_as_its_pixels_are_in_training():
    tones, background = learned(), torch.tensor([0.2, 0.6, 1.0])
    opacity = torch.rand(7, 5)
    emitted = opacity[..., None] * torch.rand(7, 5, 3)
    view = View(emitted + (1 - opacity)[..., None] * background, opacity, opacity)
    pixels = (1 * 7 + torch.arange(7)[:, None]) * 9 + torch.arange(5)
    rays = Rays(torch.zeros(35, 3), torch.ones(35, 3), torch.zeros(35), torch.ones(35))
    batch = Batch(
        rays, torch.rand(35, 4), pixels.flatten(), background.expand(35, 3), images_of=lambda each: each // 63
    )
    trained = tones.photographed(emitted.view(-1, 3), opacity.flatten(), batch).view(7, 5, 3)
    shown = tones.photograph(view, 1, background)
    torch.testing.assert_close(shown.rgb, trained + (1 - opacity)[..., None] * background, atol=1e-5, rtol=1e-5)
    captured = tones.photograph(view, 1, None).rgb.view(-1, 3)
    torch.testing.assert_close(captured, tones.photographed(view.rgb.view(-1, 3), torch.ones(35), batch))


def test_views_of_other_cameras_are_left_as_they_are():
    state, given = learned().state_dict(), cameras()
    others = replace(given, intrinsics=given.intrinsics * torch.tensor([[1.1], [1.0], [1.0]]))
    tones = CameraTones.restored(state, others)
    rgb = torch.rand(3, 3)
    shown = tones(rgb, torch.ones(3), torch.ones(3, 2), torch.arange(3))
    assert torch.equal(shown[0], rgb[0])
    assert not torch.isclose(shown[1:], rgb[1:]).any()


# -------------------------------------------------------------------------------------------------- in a session


def session_of(scene: Scene, *overrides: str, **options) -> Session:
    settings = preset(
        "device=cpu",
        "model=dense",
        "trainer=cpu",
        "trainer.steps=150",
        "trainer.visible_samples=16384",
        "trainer.finest_resolution=48",
        "trainer.stages=[{step:0,resolution:24},{step:60,resolution:48}]",
        "trainer.occupancy.resolution=32",
        "trainer.preview_every=0",
        "trainer.evaluation.views=null",
        *overrides,
        name="train_cpu",
    )
    return Session(scene, settings, **options)


@pytest.fixture(scope="module")
def bricks() -> Scene:
    return voxelfield.load_scene("bricks", image_size=50)


@pytest.fixture(scope="module")
def scene(bricks) -> Scene:
    """Bricks as photographed by two cameras, of which the second responds otherwise, with vignetting."""
    return two_cameras(vignetted(turned(bricks)))


@pytest.fixture(scope="module")
def trained(scene, tmp_path_factory) -> Session:
    return fitted(session_of(scene, *BOTH, "optimizer.exposure_lr=0.02", output=tmp_path_factory.mktemp("run")))


@pytest.mark.slow
def test_views_held_out_gain_from_the_tones_of_their_cameras(scene, trained):
    plain = fitted(session_of(scene))
    found, before = trained.evaluate(progress=False), plain.evaluate(progress=False)
    assert found.psnr > before.psnr + 1.5  # dB
    assert found.means()["psnr_fitted"] > found.psnr - 1
    assert plain.component(CameraTones) is None
    assert "psnr_fitted" not in before.means()


def test_the_response_of_a_camera_is_found(trained):
    tones = trained.component(CameraTones)
    second = int(tones.camera[1])
    slopes = (tones.log_slopes[second] - tones.log_slopes[1 - second]).exp().cpu()
    found = slopes.cumsum(dim=1) / 8  # the curve from one camera's values to the other's
    wanted = (torch.arange(1, 9) / 8) ** EXPONENTS[:, None]
    assert (found - wanted)[:, 1:6].abs().mean() < 0.5 * (torch.arange(1, 9) / 8 - wanted)[:, 1:6].abs().mean()


def test_tones_are_resumed_loaded_and_exported(scene, trained, tmp_path):
    wanted, view = trained.evaluate(views=2, progress=False).psnr, trained.renderer().view(scene.test.cameras, 1)
    loaded = voxelfield.load(trained.output, "cpu")
    assert loaded.evaluate(scene.test, views=2, progress=False).psnr == pytest.approx(wanted, abs=1e-4)
    # Pictures of the scene are not darkened.
    torch.testing.assert_close(loaded.render(scene.test.cameras, 1).rgb, view.rgb)
    save_model(tmp_path / "model.safetensors", loaded, quality="exact")
    exported = voxelfield.load(tmp_path / "model.safetensors", "cpu")
    assert exported.evaluate(scene.test, views=2, progress=False).psnr == pytest.approx(wanted, abs=0.1)
    again = restored(session_of(scene, *BOTH), trained.output)
    assert torch.equal(again.component(CameraTones).falloff, trained.component(CameraTones).falloff)
    assert torch.equal(again.component(CameraTones).log_slopes, trained.component(CameraTones).log_slopes)


def test_views_of_other_cameras_are_named(scene, trained, caplog):
    cameras = scene.test.cameras
    intrinsics = cameras.intrinsics.clone()
    intrinsics[1, 0] += 1
    split = replace(scene.test, cameras=replace(cameras, intrinsics=intrinsics))
    trained.result().evaluate(split, progress=False)
    assert "no known vignetting and response, without which 1 of the views are compared: " in caplog.text


def test_tones_join_exposures_an_environment_and_refined_cameras(bricks):
    scene = two_cameras(bricks_under_sky(40, 12))
    options = ("trainer.steps=4", "model.environment=map", "trainer.exposure=affine", "camera=refine")
    session = session_of(scene, *BOTH, *options, "camera.search_poses=0", "camera.focal=true", "camera.test_steps=2")
    with torch.no_grad():
        session.component(CameraTones).log_slopes[0] += 1.0
    session.fit()
    batch = session._state.training_step.batch
    plain = session.model.environment(batch.rays.directions)
    assert not torch.allclose(batch.background, plain, atol=0.01)
    assert session.component(CameraTones).falloff.all()
    assert session.component(AffineExposure).log_gain.any()
    assert session.evaluate(progress=False).psnr > 5


@pytest.mark.parametrize("key", ["vignetting", "response"])
def test_tones_are_not_resumed_by_halves(scene, trained, key):
    with pytest.raises(ValueError, match=f"^trainer.{key} must be true, as in the checkpoint, got false$"):
        session_of(scene, *BOTH, f"trainer.{key}=false").restore(load_checkpoint(trained.output))


def test_what_could_not_be_learned_or_found_again_is_refused(bricks, scene, trained):
    with pytest.raises(
        ValueError, match=r"^trainer.response must be false for photographs of a single camera, .*true$"
    ):
        session_of(bricks, "trainer.response=true")
    with pytest.raises(ValueError, match=r"^camera.search_poses must be 0 with trainer.vignetting=true, .* got 128$"):
        session_of(scene, "trainer.vignetting=true", "camera=refine")
    cameras = scene.train.cameras
    other = replace(scene.train, cameras=replace(cameras, intrinsics=cameras.intrinsics * 1.01))
    session = session_of(replace(scene, splits={"train": other}), *BOTH)
    with pytest.raises(ValueError, match=r"^scene must have the 2 cameras of the checkpoint, .* got 2 of which"):
        session.restore(load_checkpoint(trained.output))
