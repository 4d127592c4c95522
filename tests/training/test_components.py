"""What a stranger adds to training: losses, components, samplers, data of their own, and a loop of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from quick_presets import preset
from small_sessions import fitted, restored
from torch import nn

import voxelfield
from voxelfield import Scene, Session
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.models.component import Component
from voxelfield.models.dense import DenseConfig, DenseModel
from voxelfield.models.pixel_sampler import PixelSampler
from voxelfield.rendering.march import visible_samples
from voxelfield.trained.checkpoint_file import CheckpointError, load_checkpoint

FIXTURE = Path(__file__).parent.parent / "fixtures" / "lego"
STEPS = 12


@pytest.fixture(scope="module")
def scene() -> Scene:
    return load_blender(FIXTURE, LoadOptions(downscale=8, aabb=((-1.5,) * 3, (1.5,) * 3)))


def settings():
    chosen = preset("model=dense", "trainer=smoke", device="cpu").trainer
    return replace(chosen, steps=STEPS, visible_samples=2048, preview_every=0)


class Tint(Component):
    """Learns a colour that is added to every pixel, counts its calls, and has a penalty."""

    name = "tint"

    def __init__(self, device="cpu") -> None:
        self.color = nn.Parameter(torch.zeros(3, device=device))
        self.calls: list[str] = []

    def before_step(self, step):
        assert isinstance(step, int)
        self.calls.append("before")

    def prepare(self, batch):
        assert len(batch.images) == len(batch.pixels)
        self.calls.append("prepare")

    def adjust(self, outputs, batch):
        self.calls.append("adjust")
        outputs.rgb = outputs.rgb + self.color

    def losses(self, outputs, batch):
        self.calls.append("losses")
        return {"tint": 0.01 * self.color.square().sum()}

    def after_backward(self, step):
        self.number = step.clone()
        self.calls.append("backward" if self.color.grad is not None else "no gradient")

    def after_step(self, step):
        self.counts_later = step == self.number  # not compared here, because that would synchronise
        self.calls.append("after" if self.color.grad is None else "gradient left")

    def param_groups(self):
        return {"tint": ([self.color], 0.05)}

    def scalars(self):
        return {"tint/red": float(self.color.detach()[0])}

    def state_dict(self):
        return {"color": self.color.detach()}

    def load_state_dict(self, state):
        with torch.no_grad():
            self.color.copy_(state["color"])


def session_of(scene, *components, device="cpu", **options):
    return Session(scene, "dense", trainer=settings(), components=components, device=str(device), **options)


def train(scene, device, component, output=None):
    torch.manual_seed(1)
    return session_of(scene, component, output=output, device=device, seed=3)


def test_a_component_takes_part_in_every_step(scene, device):
    component = Tint(device)
    session = train(scene, device, component)
    rates = []
    session.log.scalars = lambda step, values: rates.append(values)
    session.fit()
    assert component.calls[:6] == ["before", "prepare", "adjust", "losses", "backward", "after"]
    assert set(component.calls) == {"before", "prepare", "adjust", "losses", "backward", "after"}
    if device.type == "cpu":
        assert len(component.calls) == 6 * STEPS
    assert component.color.abs().min() > 0
    assert bool(component.counts_later), "a step counts once it is over"
    logged = {name for values in rates for name in values}
    assert {"loss/tint", "tint/red", "lr/tint"} <= logged


@pytest.mark.cuda
def test_python_code_runs_in_every_step_without_a_graph(scene):
    device = torch.device("cuda")
    component = Tint(device)
    loop = replace(settings(), cuda_graph=False)
    Session(scene, "dense", trainer=loop, components=[component], device="cuda").fit()
    assert len(component.calls) == 6 * STEPS


def test_the_state_of_a_component_is_resumed_to_the_bit(scene, tmp_path):
    device = torch.device("cpu")
    whole = fitted(train(scene, device, Tint()))
    first = train(scene, device, Tint(), tmp_path)
    while first.step < 5:
        first.train_step()
    first.save()
    component = Tint()
    second = fitted(restored(train(scene, device, component), tmp_path))
    assert torch.equal(component.color, whole.components[-1].color)
    assert torch.equal(second.field.grid.features, whole.field.grid.features)
    alone = session_of(scene)
    with pytest.raises(ValueError, match="components must be those of the checkpoint, tint, got none"):
        alone.restore(load_checkpoint(tmp_path))


def test_a_state_that_cannot_be_saved_is_named_with_the_file(scene, tmp_path):
    component = Tint()
    component.state_dict = lambda: {"path": Path("x")}
    session = train(scene, torch.device("cpu"), component, tmp_path)
    reason = r"checkpoint_0000000\.pt: state\['tint'\]\['path'\] is a pathlib\.PosixPath: a checkpoint stores"
    with pytest.raises(CheckpointError, match=reason):
        session.save()


def test_parts_have_names_of_their_own(scene):
    with pytest.raises(ValueError, match="components must have names of their own, got 'tint', 'tint'"):
        session_of(scene, Tint(), Tint())
    with pytest.raises(TypeError, match=r"components\[0\] must be a voxelfield\.models\.Component, got 'tint'"):
        session_of(scene, "tint")
    with pytest.raises(TypeError, match=r"losses\['mine'\] must be a function of outputs and batch, got 0\.5"):
        session_of(scene, losses={"mine": 0.5})


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (lambda pixels: pixels.mean(1), r"a scalar tensor, of shape \(\), on cpu, got one of shape \(\d+,\) on cpu"),
        (lambda pixels: pixels.mean().to("meta"), r"a scalar tensor, .*, on cpu, got one of shape \(\) on meta"),
        (lambda pixels: "low", "a dense scalar tensor of floats, got 'low'"),
        (lambda pixels: (pixels > 0).sum(), r"a dense scalar .*, got a tensor of torch\.int64 and torch\.strided"),
        (lambda pixels: pixels.mean().to_sparse(), r"a dense scalar .* torch\.float32 and torch\.sparse_coo"),
    ],
)
def test_a_loss_that_is_no_scalar_is_named(scene, value, got):
    losses = {"mine": lambda outputs, batch: value(outputs.pixels)}
    session = session_of(scene, losses=losses)
    with pytest.raises(ValueError, match=rf"^losses\['mine'\] must return {got}$"):
        session.train_step()


def test_a_component_whose_losses_are_no_mapping_is_named(scene):
    tint = Tint()
    tint.losses = lambda outputs, batch: None
    session = session_of(scene, tint)
    with pytest.raises(ValueError, match=r"^losses of tint must be a mapping of names to terms, got None$"):
        session.train_step()


def test_a_loss_is_added_and_one_of_the_same_name_replaces(scene):
    seen = {}

    def mine(outputs, batch):
        seen["rays"] = len(batch.rays)
        assert outputs.rendering.opacity.shape == (seen["rays"],)
        seen["field"] = outputs.field
        assert batch.for_rays(batch.rgba).shape == (seen["rays"], 4)
        return 0.1 * outputs.mean_over_rays(outputs.rendering.opacity)

    def photometric(outputs, batch):
        return (outputs.pixels - batch.truth).abs().mean()

    session = session_of(scene, losses={"mine": mine, "photometric": photometric})
    session.train_step()
    totals = session._state.training_step.totals.read()
    assert seen["rays"] > 0
    assert seen["field"] is session.field
    assert 0 < totals["loss/mine"] <= 0.1
    assert totals["loss/photometric"] == pytest.approx(float(session._state.training_step.error))


def test_a_sampler_places_the_samples(scene):
    seen = []

    def every_second(field, rays, occupancy, settings, jitter=False, capacity=None):
        seen.append(settings.step)
        return visible_samples(field, rays, occupancy, replace(settings, step=2 * settings.step), jitter, capacity)

    session = session_of(scene, sampler=every_second)
    batch = session.train_step()
    assert len(seen) == 1
    assert batch.truth.shape == (len(batch.pixels), 3)


def test_batches_carry_data_of_images_and_of_pixels(scene, device):
    sampler = PixelSampler(scene.train, device)
    count, height, width = scene.train.images.shape[:3]
    times = torch.rand(count)
    depth = torch.rand(count, height, width)
    sampler.carry("time", times)
    sampler.carry("depth", depth)
    batch = sampler.batch(50, scene.aabb.to(device), "white")
    image, within = batch.pixels.cpu() // (height * width), batch.pixels.cpu() % (height * width)
    assert torch.equal(batch.images.cpu(), image)
    assert torch.equal(batch["time"].cpu(), times[image])
    assert torch.equal(batch["depth"].cpu(), depth.flatten(1)[image, within])
    with pytest.raises(KeyError, match="carry no 'normal', but colours, 'time', 'depth'"):
        batch["normal"]
    with pytest.raises(ValueError, match="name must be a new one, got 'time'"):
        sampler.carry("time", times)


def test_a_loop_of_ones_own_trains_as_fit_does(scene):
    whole = fitted(session_of(scene, seed=4))
    stepped = session_of(scene, seed=4)
    while stepped.step < STEPS:
        stepped.train_step()
    looped = session_of(scene, seed=4)
    assert [looped.step for _ in looped] == list(range(1, STEPS + 1))
    for other in (stepped, looped):
        assert torch.equal(other.field.grid.features, whole.field.grid.features)
    with pytest.raises(ValueError, match=rf"session\.step must be below trainer\.steps, {STEPS}, got {STEPS}"):
        stepped.train_step()


class Counting(DenseModel):
    """Counts its steps and has a loss of its own, a parameter group and a hook between steps."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64, device=self.device))
        self.between = []

    def before_step(self, step):
        super().before_step(step)
        self.between.append(step)

    def losses(self, outputs, batch):
        return {**super().losses(outputs, batch), "mine": 0.1 * outputs.mean_over_rays(outputs.rendering.opacity)}

    def after_step(self, step):
        self.steps += 1

    def param_groups(self):
        return {"first": ([next(self.field.decoder.parameters())], 1e-3)}


@dataclass
class CountingConfig(DenseConfig):
    def build_model(self, field, occupancy, sampling):
        return Counting(field, occupancy, sampling)


def test_a_model_of_ones_own_owns_its_training(scene, device, tmp_path):
    session = Session(scene, CountingConfig(), trainer=settings(), device=str(device), output=tmp_path)
    rates = []
    session.log.scalars = lambda step, values: rates.append(values)
    session.fit()
    assert isinstance(session.model, Counting)
    assert session.model.between == list(range(STEPS))
    assert int(session.model.steps) == STEPS
    assert {"loss/mine", "loss/photometric", "lr/first", "lr/network"} <= {name for each in rates for name in each}
    first = next(session.field.decoder.parameters())
    for own in session.optimizers.networks.values():
        assert all(parameter is not first for parameter in own.param_groups[0]["params"])
    again = restored(Session(scene, CountingConfig(), trainer=settings(), device=str(device)), tmp_path)
    assert torch.equal(again.field.grid.features, session.field.grid.features)
    assert int(again.model.steps) == STEPS


def test_a_component_without_a_state_is_resumed(scene, tmp_path):
    class Stateless(Tint):
        def state_dict(self):
            return {}

    train(scene, torch.device("cpu"), Stateless(), tmp_path).fit()
    train(scene, torch.device("cpu"), Stateless()).restore(load_checkpoint(tmp_path))
    plain = session_of(scene, output=tmp_path / "plain")
    plain.train_step()
    plain.save()
    train(scene, torch.device("cpu"), Stateless()).restore(load_checkpoint(tmp_path / "plain"))


@pytest.mark.parametrize("name", ["model", "step", "optimizer", "rng"])
def test_a_component_with_the_name_of_another_entry_is_refused(scene, name):
    component = Tint()
    component.name = name
    with pytest.raises(
        ValueError, match=f"components must not have the name of another entry of checkpoints, got '{name}'"
    ):
        session_of(scene, component)


@pytest.mark.parametrize("name", ["cameras", "tones"])
def test_a_component_may_have_the_name_of_one_of_the_package_that_is_off(scene, tmp_path, name):
    named = [Tint(), Tint()]
    for component in named:
        component.name = name
    train(scene, torch.device("cpu"), named[0], tmp_path).fit()
    train(scene, torch.device("cpu"), named[1]).restore(load_checkpoint(tmp_path))
    assert torch.equal(named[1].color, named[0].color)
    loaded = voxelfield.load(tmp_path, "cpu")
    assert loaded.cameras is None
    assert loaded.tones is None


def test_the_settings_of_a_whole_run_leave_no_others(scene):
    config = preset("model=dense", "trainer=smoke", device="cpu")
    with pytest.raises(TypeError, match="seed must be None with the settings of a whole run, got 3"):
        Session(scene, config, seed=3)


def test_leaving_the_loop_early_saves(scene, tmp_path):
    session = session_of(scene, output=tmp_path)
    for _ in session:
        if session.step == 4:
            break
    assert load_checkpoint(tmp_path)["step"] == 4
