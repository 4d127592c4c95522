"""Exposure that varies within photographs: the grids, and bricks in photographs with gains that vary over each."""

from __future__ import annotations

import pytest
import torch
from quick_presets import preset
from toned_scene import smooth_gains, unevenly_exposed
from torch import Tensor
from torch.nn import functional as F

import voxelfield
from voxelfield.datasets.scene import Scene
from voxelfield.evaluation.evaluation import evaluate_split
from voxelfield.rendering.cameras import Cameras
from voxelfield.training.cameras.exposure import BilateralExposure
from voxelfield.training.session import Session
from voxelfield.training.state.checkpoint import load_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = torch.tensor([[9, 6], [5, 7], [9, 4]])


def cameras() -> Cameras:
    return Cameras(torch.eye(4).repeat(3, 1, 1), torch.ones(3, 4), 9, 7, sizes=SIZES)


def learned(dtype: torch.dtype = torch.float32) -> BilateralExposure:
    """A module that has learned something."""
    exposure = BilateralExposure(cameras()).to(dtype)
    torch.nn.init.normal_(exposure.grids, 0.1, 0.2)
    exposure.centre()
    return exposure


def pixels_of(image: Tensor, column: Tensor, row: Tensor) -> Tensor:
    return (image * 7 + row) * 9 + column


# ---------------------------------------------------------------------------------------------------- the module


def test_before_training_nothing_changes_to_the_bit(device):
    exposure = BilateralExposure(cameras()).to(device)
    rgb, pixels = torch.rand(12, 3, device=device), torch.randint(9 * 7 * 3, (6,), device=device)
    assert torch.equal(exposure(rgb, torch.rand(12, device=device), pixels), rgb)
    assert exposure.penalty() == 0
    assert torch.equal(exposure.corrections(), torch.eye(3, 4, device=device).expand(3, 16, 16, 8, 3, 4))


def test_each_ray_is_transformed_as_the_grid_of_its_image_says_at_its_place_and_luminance(device):
    exposure = learned().to(device)
    image = torch.tensor([0, 1, 2, 2, 0, 1])
    inside = torch.rand(6, 2) * SIZES[image]
    inside[2:4] = torch.stack((torch.zeros(2), SIZES[2] - 1.0))  # the first and the last pixel
    column, row = inside.long().unbind(dim=1)
    pixels = pixels_of(image, column, row).to(device)
    rgb, opacity = 1.2 * torch.rand(12, 3, device=device), torch.rand(12, device=device)
    shown = exposure(rgb, opacity, pixels)
    for ray in range(12):
        pixel = ray // 2
        grid = exposure.corrections()[image[pixel]].flatten(-2).permute(3, 2, 1, 0)[None]
        place = (inside[pixel].floor() + 0.5) / SIZES[image[pixel]]
        luminance = (rgb[ray] @ torch.tensor([0.299, 0.587, 0.114], device=device)).clamp(0, 1)
        point = 2 * torch.cat((place.to(device), luminance[None])) - 1
        matrix = F.grid_sample(grid, point.view(1, 1, 1, 1, 3), align_corners=True, padding_mode="border").view(3, 4)
        expected = matrix @ torch.cat((rgb[ray], opacity[ray, None]))
        torch.testing.assert_close(shown[ray], expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_finite_differences():
    exposure = learned(torch.float64)
    exposure.sizes = exposure.sizes.float()
    rgb = 0.1 + 0.8 * torch.rand(6, 3, dtype=torch.float64)
    opacity, pixels = torch.rand(6, dtype=torch.float64), pixels_of(torch.tensor([0, 1, 2]), 2, 3)
    direction = torch.randn_like(exposure.grids)

    def run(rgb: Tensor, opacity: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        grids = exposure.grids.detach() + length * direction
        module = BilateralExposure(cameras()).double()
        del module.grids
        module.grids = grids  # not a parameter, so that gradients pass through it
        return module(rgb, opacity, pixels), module.penalty()

    inputs = (rgb, opacity, torch.zeros((), dtype=torch.float64))
    assert torch.autograd.gradcheck(run, tuple(value.requires_grad_() for value in inputs))


def test_the_penalty_is_the_total_variation_of_each_grid_by_itself():
    exposure = BilateralExposure(cameras())
    with torch.no_grad():
        exposure.grids += torch.tensor([1.0, -2.0, 0.5]).view(3, 1, 1, 1, 1)
        assert exposure.penalty() == 0
        exposure.grids[1, 3] += 6
    assert exposure.penalty().item() == pytest.approx(2 * 36 / (3 * 15))


def test_the_mean_image_is_not_corrected():
    exposure = learned()
    mean = exposure.corrections().mean(dim=0)
    torch.testing.assert_close(mean, torch.eye(3, 4).expand_as(mean), atol=1e-6, rtol=0)
    assert exposure.corrections()[0].std() > 0.1


def test_there_must_be_images():
    with pytest.raises(ValueError, match=r"^cameras must be at least 1, got 0$"):
        BilateralExposure(cameras()[:0])


# -------------------------------------------------------------------------------------------------- in a session


@pytest.fixture(scope="module")
def scene() -> Scene:
    found = voxelfield.load_scene("bricks", image_size=50)
    return Scene(found.name, found.aabb, {"train": unevenly_exposed(found.train[::2], 0.2), "test": found.test[::5]})


def session_of(scene: Scene, kind: str, *overrides: str, **options) -> Session:
    changes = ("trainer.image_size=50", "trainer.preview_every=0", "trainer.checkpoint_every=0", *overrides)
    settings = preset("model=dense", "trainer=cpu", f"trainer.exposure={kind}", *changes, device="cpu")
    return Session(scene, settings, **options)


FITTED = (
    "trainer.steps=250",
    "trainer.stages=[{step: 0, resolution: 32, crop: true}]",
    "trainer.finest_resolution=32",
    "trainer.visible_samples=8192",
)


@pytest.mark.slow
def test_gains_that_vary_within_photographs_are_found(scene):
    views = {}
    for kind in ("none", "bilateral"):
        session = session_of(scene, kind, *FITTED)
        session.fit()
        background = session.model.background
        views[kind] = evaluate_split(
            session.renderer().view, scene.test, background, fit_exposure=True, progress=False
        ).means()
    assert views["bilateral"]["psnr"] > views["none"]["psnr"] + 1
    assert views["bilateral"]["psnr_fitted"] > views["none"]["psnr_fitted"] + 0.7
    # What a grey becomes over the bricks in the middle of each image, compared with the mean image and its own mean.
    grey = torch.tensor([0.5, 0.5, 0.5, 1.0])
    found = (session.exposure.corrections()[:, 4:12, 4:12, 3] @ grey).mean(dim=-1).detach()
    true = smooth_gains(len(found), 16, 16, 0.2)[:, 4:12, 4:12, 0].transpose(1, 2)
    for values in (found, true):
        values.log_()
        values -= values.mean(dim=0)
        values -= values.mean(dim=(1, 2), keepdim=True)
    assert torch.corrcoef(torch.stack((found.flatten(), true.flatten())))[0, 1] > 0.6


SHORT = ("trainer.steps=6", "trainer.stages=[{step: 0, resolution: 16}]", "trainer.finest_resolution=16")


def test_the_field_learns_as_without_until_the_grids_do(scene):
    sessions = []
    for kind in ("none", "bilateral"):
        sessions.append(session_of(scene, kind, *SHORT, "trainer.steps=1"))
        sessions[-1].fit()
    plain, other = sessions
    for one, two in zip(plain.field.parameters(), other.field.parameters(), strict=True):
        assert torch.equal(one, two)
    assert other.exposure.grids.any(), "and yet it has learned"
    other = session_of(scene, "bilateral", *SHORT)
    other.fit()
    torch.testing.assert_close(other.exposure.grids.mean(dim=0), torch.zeros(16, 16, 8, 12), atol=1e-7, rtol=0)


def test_a_resumed_training_ends_the_same_to_the_bit(scene, tmp_path):
    whole = session_of(scene, "bilateral", *SHORT, output=tmp_path / "whole")
    whole.fit()

    def interrupt(session: Session) -> None:
        if session.step == 3:
            session.save()
            raise KeyboardInterrupt

    first = session_of(scene, "bilateral", *SHORT, output=tmp_path / "parts", on_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.fit()
    second = session_of(scene, "bilateral", *SHORT, output=tmp_path / "parts")
    saved = load_checkpoint(first.output)
    second.restore(saved)
    second.fit()
    assert torch.equal(second.exposure.grids, whole.exposure.grids)
    for kind in ("affine", "none"):
        session = session_of(scene, kind, *SHORT)
        with pytest.raises(
            ValueError, match=rf"^trainer.exposure must be bilateral, as in the checkpoint, got {kind}$"
        ):
            session.restore(saved)
    fewer = Scene(scene.name, scene.aabb, {"train": scene.train[:9]})
    with pytest.raises(ValueError, match=r"^scene must have 50 training images, .*, got 9$"):
        session_of(fewer, "bilateral", *SHORT).restore(saved)


def test_lost_cameras_are_not_looked_for(scene):
    message = r"^camera.search_poses must be 0 with trainer.exposure=bilateral, .*, got 128$"
    with pytest.raises(ValueError, match=message):
        session_of(scene, "bilateral", *SHORT, "camera=refine")
    session = session_of(scene, "bilateral", *SHORT, "camera=refine", "camera.search_poses=0")
    session.fit()
    assert session.exposure.grids.isfinite().all()
