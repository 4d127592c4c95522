"""Exposure of training images: what the module computes, and photographs of unlike exposure, trained and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from camera_poses import looking_at
from painted_ball import along_and_beside
from PIL import ExifTags, Image
from small_pyramid import settings
from small_sessions import Recorder, fitted, restored
from torch import Tensor

from voxelfield.components.exposure import AffineExposure
from voxelfield.datasets import images
from voxelfield.datasets.images import exif_exposures
from voxelfield.datasets.scene import Scene, Split
from voxelfield.evaluation.evaluation import evaluate_split
from voxelfield.rendering.cameras import Cameras
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.trained.loading import load
from voxelfield.trained.model_file import save_model
from voxelfield.training.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 24
RADIUS = 0.7


def learned(images: int = 4, dtype: torch.dtype = torch.float32) -> AffineExposure:
    """A module that has learned something."""
    exposure = AffineExposure(torch.eye(4).repeat(images, 1, 1)).to(dtype)
    torch.nn.init.normal_(exposure.log_gain, 0.2, 0.3)
    torch.nn.init.normal_(exposure.offset, -0.1, 0.1)
    return exposure


# ---------------------------------------------------------------------------------------------------- the module


def test_before_training_nothing_changes_to_the_bit(device):
    exposure = AffineExposure(torch.eye(4).repeat(3, 1, 1)).to(device)
    rgb, opacity = torch.rand(12, 3, device=device), torch.rand(12, device=device)
    images = torch.tensor([0, 2, 2, 1, 0, 1], device=device)
    assert torch.equal(exposure(rgb, opacity, images), rgb)
    assert torch.equal(exposure.undo(rgb[:6], images), rgb[:6])
    assert exposure.penalty() == 0


def test_rays_get_the_gain_and_offset_of_their_image(device):
    exposure = learned().to(device)
    gain, offset = (values.detach() for values in exposure.corrections())
    rgb, opacity = torch.rand(6, 3, device=device), torch.rand(6, device=device)
    corrected = exposure(rgb, opacity, torch.tensor([3, 0, 3], device=device))
    for ray, image in enumerate((3, 3, 0, 0, 3, 3)):
        expected = gain[image] * rgb[ray] + offset[image] * opacity[ray]
        torch.testing.assert_close(corrected[ray], expected)
    assert not torch.allclose(gain[0], gain[3])


def test_the_mean_image_is_not_corrected(device):
    gain, offset = learned(7).to(device).corrections()
    torch.testing.assert_close(gain.log().mean(dim=0), torch.zeros(3, device=device), atol=1e-6, rtol=0)
    torch.testing.assert_close(offset.mean(dim=0), torch.zeros(3, device=device), atol=1e-6, rtol=0)


def test_undoing_is_the_inverse(device):
    exposure = learned().to(device)
    rgb, images = 0.1 + 0.8 * torch.rand(5, 3, device=device), torch.tensor([0, 3, 1, 1, 2], device=device)
    shown = exposure(rgb, torch.ones(5, device=device), images)
    assert not torch.allclose(shown, rgb)
    found = exposure.undo(shown, images)
    torch.testing.assert_close(found, rgb)
    assert not found.requires_grad
    with torch.no_grad():
        exposure.log_gain[0] -= 20
    black = torch.full((1, 3), 0.01, device=device)
    undone = exposure.undo(black, images[:1])
    assert undone.min() >= 0
    assert undone.max() <= 1


def test_gradients_are_those_of_finite_differences():
    exposure = learned(3, torch.float64)
    rgb = torch.rand(8, 3, dtype=torch.float64, requires_grad=True)
    opacity = torch.rand(8, dtype=torch.float64, requires_grad=True)
    images = torch.tensor([0, 2, 2, 0])

    def run(rgb: Tensor, opacity: Tensor, log_gain: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        values = {"log_gain": log_gain, "offset": offset}
        return (
            torch.func.functional_call(exposure, values, (rgb, opacity, images)),
            torch.func.functional_call(_Penalty(exposure), {f"exposure.{n}": v for n, v in values.items()}, ()),
        )

    assert torch.autograd.gradcheck(run, (rgb, opacity, exposure.log_gain, exposure.offset))


class _Penalty(torch.nn.Module):
    def __init__(self, exposure: AffineExposure) -> None:
        super().__init__()
        self.exposure = exposure

    def forward(self) -> Tensor:
        return self.exposure.penalty()


def test_the_penalty_does_not_see_the_mean():
    exposure = learned()
    before = exposure.penalty().item()
    with torch.no_grad():
        exposure.log_gain += 0.7
        exposure.offset -= torch.tensor([0.1, 0.2, 0.3])
    assert exposure.penalty().item() == pytest.approx(before, rel=1e-4)
    assert before > 0.01


# ------------------------------------------------------------------------------------------------- other views


def around(angles: Tensor) -> Tensor:
    """Poses (N, 4, 4) on a circle of radius 3, from which cameras look at its centre."""
    back = torch.stack((angles.cos(), angles.sin(), torch.zeros_like(angles)), dim=-1)
    return looking_at((0.0, 0.0, 0.0), 3 * back)


def exposed(poses: Tensor, log_gain: Tensor) -> AffineExposure:
    exposure = AffineExposure(poses)
    with torch.no_grad():
        exposure.log_gain.copy_(log_gain - log_gain.mean(dim=0))
        exposure.offset.copy_(0.1 * exposure.log_gain)
    return exposure


CIRCLE = 2 * torch.pi * torch.arange(40) / 40


def waves(angles: Tensor) -> Tensor:
    """Logarithms of gains (N, 3) of a camera that measures what it sees on its way around."""
    return 0.3 * torch.stack((angles.sin(), angles.cos(), (2 * angles).sin()), dim=-1)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e4])
def test_exposures_between_photographs_are_predicted(device, unit):
    poses, between = around(CIRCLE), CIRCLE + torch.pi / 40
    poses[:, :3, 3] *= unit
    others = around(between)
    others[:, :3, 3] *= unit
    gain, offset = exposed(poses, waves(CIRCLE)).to(device).predict(others.to(device))
    assert gain.device.type == offset.device.type == device.type
    torch.testing.assert_close(gain.log().cpu(), waves(between), atol=0.03, rtol=0)
    torch.testing.assert_close(offset.cpu(), 0.01 * waves(between), atol=1e-3, rtol=0)
    assert waves(between).abs().amax() > 0.25


def test_a_photograph_has_its_own_exposure():
    exposure = exposed(around(CIRCLE), waves(CIRCLE))
    gain, offset = exposure.predict(exposure.poses[[7, 30]])
    expected = [values.detach()[[7, 30]] for values in exposure.corrections()]
    torch.testing.assert_close([gain, offset], expected, atol=1e-6, rtol=1e-5)


def test_directions_decide_where_places_do_not():
    # Half of the cameras of a rig look one way, into the light, the others look back, from the same places.
    places = torch.linspace(0, 1, 12).repeat_interleave(2)
    poses = around(torch.tensor([0.0, torch.pi]).repeat(12))
    poses[:, :3, 3] = places[:, None] * torch.tensor([0.0, 1.0, 0.0])
    gains = torch.tensor([-0.2, 0.2]).repeat(12)[:, None].expand(-1, 3)
    other = around(torch.tensor([0.0, torch.pi]))
    other[:, :3, 3] = torch.tensor([0.0, 0.53, 0.0])
    gain, _ = exposed(poses, gains).predict(other)
    torch.testing.assert_close(gain.log(), gains[:2].contiguous(), atol=5e-3, rtol=0)


def test_what_neighbours_do_not_tell_is_not_predicted():
    alternating = torch.tensor([0.3, -0.3]).repeat(20)[:, None].expand(-1, 3)
    for poses, gains in (
        (around(CIRCLE), alternating),
        (around(CIRCLE[:3]), waves(CIRCLE[:3])),
        (around(torch.zeros(8)), alternating[:8]),
    ):
        gain, offset = exposed(poses, gains).predict(around(CIRCLE + 0.05))
        assert torch.equal(gain, torch.ones(40, 3))
        assert torch.equal(offset, torch.zeros(40, 3))


# -------------------------------------------------------------------------------------------------- in a session


def cap(count: int, phase: float) -> Cameras:
    """Cameras that look at the ball from one side, so that they all see much the same of it."""
    number = torch.arange(count) + 0.5
    angle, away = 2.4 * number + phase, 0.7 * (number / count).sqrt()
    back = torch.stack((away.sin() * angle.cos(), -away.cos(), away.sin() * angle.sin()), dim=-1)
    intrinsics = torch.tensor([[36.0, 36.0, SIZE / 2, SIZE / 2]]).repeat(count, 1)
    return Cameras(looking_at((0.0, 0.0, 0.0), 3 * back), intrinsics, SIZE, SIZE)


def photographs(name: str, cameras: Cameras, gain: Tensor) -> Split:
    """Images of a painted ball on nothing, with a gain (N, 3) of each image."""
    images = []
    for camera in range(len(cameras)):
        rays = cameras.image_rays(camera, torch.tensor([[-1.0] * 3, [1.0] * 3]))
        along, beside = along_and_beside(rays, torch.zeros(3))
        root = RADIUS**2 - beside
        points = rays.origins + (-along - root.clamp(min=0).sqrt())[:, None] * rays.directions
        waves = points @ torch.tensor([[4.0, 1.0, -3.0], [0.3, 0.2, 0.4], [1.5, -4.0, 3.0]])
        rgb = (0.4 + 0.3 * torch.sin(waves)) * gain[camera]
        images.append(torch.cat((rgb, (root > 0).float()[:, None]), dim=-1))
    pixels = (torch.stack(images).view(-1, SIZE, SIZE, 4) * 255).round()
    assert pixels.max() <= 255
    assert pixels.min() >= 0
    return Split(pixels.to(torch.uint8), cameras, tuple(f"{name}{i}" for i in range(len(cameras))))


def ball(**gains: Tensor) -> Scene:
    """Photographs of splits ``train`` and ``test``, as many as there are gains (N, 3) of each."""
    cameras = {name: cap(len(gain), {"train": 0.0, "test": 0.2}[name]) for name, gain in gains.items()}
    splits = {name: photographs(name, cameras[name], gain) for name, gain in gains.items()}
    return Scene("ball", torch.tensor([[-1.0] * 3, [1.0] * 3]), splits)


def random_gains(count: int) -> Tensor:
    """Gains (count, 3) of about 0.75 to 1.3, mostly shared by the channels."""
    draw = torch.Generator().manual_seed(5)
    brightness = torch.rand(count, 1, generator=draw) * 0.4 - 0.2
    return (brightness + torch.rand(count, 3, generator=draw) * 0.12 - 0.06).exp()


GAIN = random_gains(16)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return ball(train=GAIN, test=random_gains(4).flip(0))


def session_of(scene: Scene, *overrides: str, output: Path | None = None, **hooks) -> Session:
    quick = (
        *("model.width=16", "trainer.steps=20"),
        "trainer.stages=[{step:0,resolution:16},{step:10,resolution:32}]",
    )
    return Session(scene, settings(*quick, *overrides), output=output, **hooks)


# Colours that do not follow the viewing direction: they would explain exposures, too.
FITTED = ("trainer.steps=300", "model.view_degree=0", "optimizer.exposure_lr=0.03")


@pytest.fixture(scope="module")
def trained(scene, tmp_path_factory) -> Session:
    return fitted(session_of(scene, "trainer.exposure=affine", *FITTED, output=tmp_path_factory.mktemp("run")))


def test_gains_of_photographs_are_found(trained):
    gain, offset = (values.detach() for values in trained.component(AffineExposure).corrections())
    error = gain / (GAIN / GAIN.log().mean(dim=0).exp()) - 1
    assert error.abs().mean() < 0.02
    assert error.abs().max() < 0.06
    assert offset.abs().max() < 0.02


def test_views_held_out_are_judged_with_and_without_a_fit(scene, trained):
    found = trained.evaluate(progress=False)
    assert found.means()["psnr_fitted"] > found.psnr + 3
    assert found.means()["ssim_fitted"] > found.ssim
    plain = fitted(session_of(scene, *FITTED))
    assert plain.component(AffineExposure) is None
    assert "psnr_fitted" not in plain.evaluate(progress=False).means()
    background = plain.model.background
    judged = evaluate_split(plain.renderer().view, scene.test, background, fit_exposure=True, progress=False)
    assert found.means()["psnr_fitted"] > judged.means()["psnr_fitted"] + 1


def gains_by_place(cameras: Cameras) -> Tensor:
    """Gains (N, 3) of a camera that measures the light, which changes from one side to the other."""
    return (0.4 * cameras.c2w[:, :1, 3] * torch.tensor([0.3, 0.2, 0.25])).exp()


@pytest.fixture(scope="module")
def measured() -> Scene:
    """Photographs by a camera that measures the light, the same without, and views that are held out."""
    return ball(train=gains_by_place(cap(40, 0.0)), test=gains_by_place(cap(4, 0.2)))


def test_views_held_out_have_the_exposure_of_photographs_nearby(measured, tmp_path):
    session = fitted(session_of(measured, "trainer.exposure=auto", *FITTED, output=tmp_path))
    found = session.evaluate(progress=False)
    trained = session.result()
    as_rendered = evaluate_split(trained.render, measured.test, trained.model.background, progress=False)
    assert found.psnr > as_rendered.psnr + 3
    assert found.means()["psnr_fitted"] > found.psnr - 2
    session.save()
    save_model(tmp_path / "model.safetensors", trained)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert load(path, device="cpu").evaluate(measured.test, progress=False).psnr == pytest.approx(found.psnr, abs=1)


def with_exif(split: Split, folder: Path, light: Tensor) -> Split:
    """The split in files whose EXIF data state exposures that multiply the light."""
    paths = tuple(folder / f"{name}.png" for name in split.names)
    for index, (path, factor) in enumerate(zip(paths, light.tolist(), strict=True)):
        aperture, speed = (2.0, 2.8, 4.0)[index % 3], (100, 400)[index % 2]
        exif = Image.Exif()
        exif[ExifTags.IFD.Exif] = {33434: factor * aperture**2 / speed, 33437: aperture, 34855: speed}
        Image.fromarray(split.image(index).numpy()).save(path, exif=exif)
    return replace(split, paths=paths)


@pytest.mark.slow
def test_exposures_that_exif_states_begin_the_gains_and_are_those_of_views_held_out(tmp_path):
    draw = torch.Generator().manual_seed(2)
    lights = {name: (torch.rand(count, generator=draw) - 0.5).exp() for name, count in (("train", 16), ("test", 4))}
    gains = {name: (light[:, None] ** torch.tensor([0.5, 0.55, 0.6])) for name, light in lights.items()}
    plain, found = ball(**gains), {}
    stated = {name: with_exif(split, tmp_path, lights[name]) for name, split in plain.splits.items()}
    scenes = {"plain": plain, "stated": replace(plain, splits=stated)}
    for name, scene in scenes.items():
        session = session_of(scene, "trainer.exposure=auto", *FITTED, output=tmp_path / name)
        start, _ = session.component(AffineExposure).corrections()
        wanted = lights["train"].log() - lights["train"].log().mean()
        torch.testing.assert_close(start.detach().log()[:, 1], wanted / 2.2 if name == "stated" else 0 * wanted)
        session.fit()
        found[name] = session.evaluate(progress=False).psnr
    assert found["stated"] > found["plain"] + 4, found
    # The slopes are those of the photographs, not of gamma 2.2.
    logs = session.component(AffineExposure).predict(plain.test.cameras.c2w, lights["test"].log())[0].log()
    expected = (lights["test"].log() - lights["train"].log().mean())[:, None] * torch.tensor([0.5, 0.55, 0.6])
    torch.testing.assert_close(logs, expected, atol=0.05, rtol=0)
    saved = load(tmp_path / "stated", device="cpu")
    assert saved.evaluate(stated["test"], progress=False).psnr == found["stated"]
    assert saved.evaluate(plain.test, progress=False).psnr < found["stated"] - 4, "of views without EXIF"
    again = restored(session_of(plain, "trainer.exposure=auto", *FITTED), tmp_path / "stated")
    assert again.evaluate(progress=False).psnr < found["stated"] - 4
    affine = session_of(scenes["stated"], "trainer.exposure=affine", *FITTED)
    assert not affine.component(AffineExposure).log_gain.any()


def test_exposures_are_known_only_if_exif_states_all(tmp_path, monkeypatch):
    split = with_exif(photographs("x", cap(3, 0.0), GAIN[:3]), tmp_path, torch.tensor([1.0, 2, 4]))
    torch.testing.assert_close(exif_exposures(split.paths), torch.tensor([1.0, 2, 4]).log(), atol=1e-5, rtol=0)
    assert exif_exposures(()) is None
    once = split.exposures
    picture = Image.fromarray(split.image(0).numpy()).convert("RGB")
    time, aperture, speed = 33434, 33437, 34855
    for values, known in (
        ({time: 0.1, aperture: 2.0, speed: 100}, True),
        ({time: 0.1, aperture: 2.0, speed: (100, 200)}, True),
        ({}, False),
        ({time: 0.1, aperture: 2.0}, False),
        ({time: 0.1, aperture: 0.0, speed: 100}, False),
        ({time: 0.0, aperture: 2.0, speed: 100}, False),
    ):
        exif = Image.Exif()
        exif[ExifTags.IFD.Exif] = values
        picture.save(tmp_path / "other.jpg", exif=exif)
        assert (exif_exposures((*split.paths, tmp_path / "other.jpg")) is not None) == known, values
    picture.save(tmp_path / "other.jpg", exif=b"Exif\0\0damaged")
    assert exif_exposures((*split.paths, tmp_path / "other.jpg")) is None
    monkeypatch.setattr(images, "in_threads", lambda *_: pytest.fail("no other file is opened"))
    assert exif_exposures((tmp_path / "other.jpg", *split.paths)) is None
    monkeypatch.setattr(images, "open_image", lambda *_: pytest.fail("a file is read once"))
    assert split.exposures is once


def test_exposures_that_do_not_vary_are_given_up(measured, tmp_path, caplog):
    scene = replace(measured, splits={**ball(train=torch.ones(40, 3)).splits, "test": measured.test})
    options = ("trainer.exposure=auto", *FITTED, "trainer.stages=[{step:0,resolution:16},{step:200,resolution:32}]")
    options += ("trainer.steps=220", "trainer.loss.exposure=0", "optimizer.exposure_lr=0.01")
    session = session_of(scene, *options, output=tmp_path)
    with caplog.at_level("INFO", "voxelfield.components.exposure"):
        session.fit()
    assert "they are not corrected (trainer.exposure=auto)" in caplog.text
    gain, offset = session.component(AffineExposure).corrections()
    assert torch.equal(gain, torch.ones(40, 3))
    assert torch.equal(offset, torch.zeros(40, 3))
    assert session.result().exposures is None
    assert load(tmp_path, device="cpu").exposures is None
    assert "psnr_fitted" not in session.evaluate(progress=False).means()
    resumed = restored(session_of(scene, *options), tmp_path)
    assert torch.equal(resumed.component(AffineExposure).corrections()[0], torch.ones(40, 3))


@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("background", ["random", "white"])
def test_the_first_step_is_that_of_a_run_without_to_the_bit(scene, side, background):
    options = ("trainer.steps=1", f"trainer.supersampling={side}", f"trainer.background={background}")
    sessions = []
    for kind in ("none", "affine"):
        sessions.append(session_of(scene, f"trainer.exposure={kind}", *options))
        sessions[-1].fit()
    torch.testing.assert_close(*([*session.field.parameters()] for session in sessions), rtol=0, atol=0)
    assert sessions[1].component(AffineExposure).log_gain.abs().min() > 0, "and yet it has learned"


@pytest.mark.parametrize("side", [1, 2])
def test_a_session_on_a_device_learns_exposures(scene, device, side):
    options = ("trainer.exposure=affine", f"trainer.supersampling={side}", "optimizer.exposure_lr=0.03")
    options += ("trainer.steps=40", f"device={device.type}")
    session = fitted(session_of(scene, *options))
    gain, _ = session.component(AffineExposure).corrections()
    assert gain.device.type == device.type
    assert gain.isfinite().all()
    assert gain.log().abs().mean() > 0.02
    # Bright photographs are told from dark ones.
    brightness = scene.train.images[..., :3].float().mean(dim=(1, 2, 3))
    together = torch.corrcoef(torch.stack((brightness, gain.detach().cpu().log().mean(dim=1))))
    assert together[0, 1] > 0.5


def test_a_resumed_training_ends_the_same_to_the_bit(scene, tmp_path):
    options = ("trainer.exposure=affine", "trainer.steps=12")
    whole = fitted(session_of(scene, *options, output=tmp_path / "whole"))

    def interrupt(session: Session) -> None:
        if session.step == 5:
            session.save()
            raise KeyboardInterrupt

    first = session_of(scene, *options, output=tmp_path / "parts", on_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.fit()
    second = restored(session_of(scene, *options, output=tmp_path / "parts"), first.output)
    assert second.step == 5
    assert second.component(AffineExposure).log_gain.abs().min() > 0
    second.fit()
    expected, actual = load_checkpoint(whole.output), load_checkpoint(second.output)
    torch.testing.assert_close([*whole.field.parameters()], [*second.field.parameters()], rtol=0, atol=0)
    assert set(expected["exposure"]) == {"log_gain", "offset", "poses", "applied"}
    for name, values in expected["exposure"].items():
        assert torch.equal(values, actual["exposure"][name]), name
    moments, others = (state["optimizer"]["exposure"]["state"] for state in (expected, actual))
    for number, parameter in moments.items():
        for name, values in parameter.items():
            assert torch.equal(values, others[number][name]), name


@pytest.mark.parametrize(("kind", "other"), [("none", "affine"), ("affine", "none")])
def test_exposures_are_not_resumed_by_halves(scene, tmp_path, kind, other):
    fitted(session_of(scene, f"trainer.exposure={kind}", "trainer.steps=1", output=tmp_path))
    second = session_of(scene, f"trainer.exposure={other}")
    with pytest.raises(ValueError, match=f"^trainer.exposure must be {kind}, as in the checkpoint, got {other}$"):
        second.restore(load_checkpoint(tmp_path))


def test_exposures_of_other_images_are_refused(scene, trained):
    train = scene.train
    fewer = Split(train.images[:9], train.cameras[:9], train.names[:9])
    session = session_of(Scene(scene.name, scene.aabb, {"train": fewer}), "trainer.exposure=affine", *FITTED)
    with pytest.raises(ValueError, match=r"^scene must have 16 training images, .*, got 9$"):
        session.restore(load_checkpoint(trained.output))


def test_rates_and_penalty_are_logged(scene):
    recorder = Recorder()
    options = ("trainer.exposure=affine", "trainer.steps=4", "trainer.log_every=1", "optimizer.exposure_lr=0.5")
    session = session_of(
        scene, *options, "trainer.rates.final_factor=0.0625", "trainer.rates.cooldown=0", logger=recorder
    )
    session.fit()
    assert recorder.values("lr/exposure") == pytest.approx([0.5, 0.25, 0.125, 0.0625], rel=1e-5)
    penalties = recorder.values("loss/exposure")
    assert penalties[0] == 0
    # The first step of Adam moves every value by its rate.
    assert 0 < penalties[1] <= 1e-3 * 2 * 0.5**2
    plain = Recorder()
    session_of(scene, "trainer.steps=1", "trainer.log_every=1", logger=plain).fit()
    assert plain.values("lr/exposure") == plain.values("loss/exposure") == []


def test_without_a_weight_there_is_no_penalty(scene):
    recorder = Recorder()
    options = ("trainer.exposure=affine", "trainer.steps=1", "trainer.log_every=1", "trainer.loss.exposure=0")
    session_of(scene, *options, logger=recorder).fit()
    assert recorder.values("loss/exposure") == []
    assert recorder.values("lr/exposure") != []
