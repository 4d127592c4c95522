"""A model as torch's module: its state, copies and moves, in and after training."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass, replace

import pytest
import torch
from quick_presets import preset
from small_sessions import fitted
from torch import nn
from viewer_scene import bricks, session

import voxelfield
from voxelfield import Field, Model, Session
from voxelfield.models.component import Component
from voxelfield.models.dense import DenseConfig, DenseModel
from voxelfield.models.model_config import ModelConfig
from voxelfield.trained.model_file import save_model
from voxelfield.trained.trained_model import restore_trained_model, untrained_model
from voxelfield.training.execution import reproducible

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
KINDS = {
    "dense": (),
    "sh": ("model.resolutions=[4,8]",),
    "pyramid": ("model.resolutions=[4,8]", "model.sparse_resolutions=[16]", "model.width=16"),
}


class Cloud(Field, nn.Module):
    """A field without a grid: a ball of fog."""

    def __init__(self, aabb: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("aabb", aabb)
        self.thickness = nn.Parameter(torch.ones((), device=aabb.device))

    def density(self, points):
        return self.thickness.exp() * (points.norm(dim=-1) < 0.5)

    def sample(self, samples, directions):
        return self.density(samples.positions), torch.full_like(samples.positions, 0.5)


@dataclass
class CloudConfig(ModelConfig):
    kind: str = "cloud"

    def build(self, aabb, resolutions, device):
        return Cloud(aabb.to(device))


class Biased(DenseModel):
    """Has a parameter, a buffer and a module of its own, and notes the calls of its hooks."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.bias = nn.Parameter(torch.zeros(3, device=self.device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=self.device))
        self.tint = nn.Linear(3, 3, device=self.device)
        self.calls: list[str] = []

    def losses(self, outputs, batch):
        self.calls.append("losses")
        shown = self.tint(outputs.rgb.detach()) + self.bias
        return {**super().losses(outputs, batch), "tint": (shown - batch.for_rays(batch.truth)).square().mean()}

    def after_backward(self, step):
        self.calls.append("after_backward")

    def after_step(self, step):
        self.calls.append("after_step")
        self.count += 1


@dataclass
class BiasedConfig(DenseConfig):
    def build_model(self, field, occupancy, sampling):
        return Biased(field, occupancy, sampling)


def settings_of(kind: str):
    box = f"scene.aabb={[list(corner) for corner in BOX]}"
    stages = "trainer.stages=[{step: 0, resolution: 8}, {step: 5, resolution: 16}]"
    return preset(
        *("scene=lego", box, "trainer=smoke", stages, "trainer.occupancy.resolution=4", f"model={kind}"), *KINDS[kind]
    )


def model_of(kind: str, device="cpu") -> Model:
    if kind == "cloud":
        config = replace(settings_of("dense"), model=CloudConfig())
        return untrained_model(config, device)
    return untrained_model(settings_of(kind), device)


def rays(device):
    cameras = bricks().train.cameras.to(device)
    points = torch.rand(50, 2, device=device) * 40
    return cameras.rays(torch.zeros(50, dtype=torch.int64, device=device), points, torch.tensor(BOX, device=device))


def disturb(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
        model.occupancy.occupied[:2] = False


@pytest.mark.parametrize("kind", [*KINDS, "cloud"])
def test_its_state_is_that_of_its_children(kind):
    model = model_of(kind)
    assert [name for name, _ in model.named_children()] == ["field", "occupancy"]
    expected = {
        **{f"field.{name}": value for name, value in model.field.state_dict().items()},
        **{f"occupancy.{name}": value for name, value in model.occupancy.state_dict().items()},
    }
    assert model.state_dict().keys() == expected.keys()
    assert [id(own) for own in model.parameters()] == [id(own) for own in model.field.parameters()]


@pytest.mark.parametrize("kind", [*KINDS, "cloud"])
def test_a_saved_state_renders_the_same(kind, device):
    torch.manual_seed(0)
    model = model_of(kind, device)
    disturb(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True, map_location="cpu")
    again = model_of(kind).to(device)
    again.load_state_dict(state)
    assert again.device == again.occupancy.occupied.device == next(again.parameters()).device
    cast = rays(device)
    assert torch.equal(again(cast).rgb, model.render(cast).rgb)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"occupancy\.aabb\""):
        again.load_state_dict({name: value for name, value in state.items() if name != "occupancy.aabb"})


@pytest.mark.parametrize("kind", [*KINDS, "cloud"])
def test_it_can_be_built_without_memory(kind):
    with torch.device("meta"):
        model = model_of(kind, "meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor))
    whole = model_of(kind)
    disturb(whole)
    model.load_state_dict(whole.state_dict(), assign=True)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    cast = rays("cpu")
    assert torch.equal(model.render(cast).rgb, whole.render(cast).rgb)


def test_a_copy_is_not_in_training_and_leaves_the_training_alone(device):
    weights = []
    # Otherwise the sums of a GPU have no order, and Adam's first steps take the sign of the tiniest.
    with reproducible(True):
        for copied in (False, True):
            training = Session(bricks(), "dense", trainer=session().config.trainer, device=str(device), seed=1)
            for _ in range(3):
                training.train_step()
            if copied:
                deep, shallow = copy.deepcopy(training.model), copy.copy(training.model)
                for other in (deep, shallow):
                    with pytest.raises(RuntimeError, match="must be trained by a Session"):
                        _ = other.setup
                assert deep.field is not training.field
                assert shallow.field is training.field
                shallow.occupancy = copy.deepcopy(shallow.occupancy)
                assert training.model.occupancy is training.occupancy is not shallow.occupancy
                with torch.no_grad():
                    for parameter in deep.parameters():
                        parameter.fill_(torch.nan)
            for _ in range(3):
                training.train_step()
            weights.append([parameter.detach().clone() for parameter in training.model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_what_a_subclass_adds_is_trained_saved_and_restored(tmp_path, device, monkeypatch):
    trainer = replace(session().config.trainer, steps=4)
    done = Session(bricks(), BiasedConfig(), trainer=trainer, output=tmp_path, device=str(device))
    before = copy.deepcopy(done.model.tint)
    done.fit()
    assert done.model.bias.abs().min() > 0
    assert not torch.equal(done.model.tint.weight, before.weight)
    assert int(done.model.count) == 4
    monkeypatch.setattr(DenseConfig, "build_model", BiasedConfig.build_model)
    save_model(tmp_path / "model.safetensors", done.result())
    for path in (tmp_path, tmp_path / "model.safetensors"):
        loaded = voxelfield.load(path, device)
        assert torch.equal(loaded.model.bias, done.model.bias)
        assert torch.equal(loaded.model.tint.weight, done.model.tint.weight)
        assert int(loaded.model.count) == 4
        assert not loaded.model.bias.requires_grad
        assert loaded.model.bias.device == loaded.model.device


def test_tensors_that_are_not_saved_are_built_again():
    settings = settings_of("dense")
    state = untrained_model(settings, "cpu").state_dict()
    built = untrained_model(settings, "cpu")

    class Table(DenseConfig):
        def build_model(self, field, occupancy, sampling):
            model = super().build_model(field, occupancy, sampling)
            model.table = torch.arange(3.0, device=model.device)
            return model

    restored = restore_trained_model(replace(settings, model=Table()), state, 0, "cpu").model
    assert restored.table.tolist() == [0, 1, 2]
    assert restored.state_dict().keys() == built.state_dict().keys()


@pytest.mark.parametrize("read", [lambda x: float(x.mean()), lambda x: x[x > 0], lambda x: x.numpy()])
def test_a_build_that_reads_values_is_built_for_its_shapes_where_there_are_values(read):
    settings, devices = settings_of("dense"), []

    class Reading(DenseConfig):
        def build(self, aabb, resolutions, device):
            devices.append(str(device))
            field = super().build(aabb, resolutions, device)
            read(field.grid.features.detach())
            return field

    state, settings = untrained_model(settings, "cpu").state_dict(), replace(settings, model=Reading())
    before = torch.get_rng_state()
    restored = restore_trained_model(settings, state, 0, "cpu").model
    assert devices == ["meta", "cpu"]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(restored.field.grid.features, state["field.grid.features"])
    assert Session(bricks(), replace(settings, device="cpu")).estimate_memory().total > 0
    Reading.build = lambda *arguments: devices.append("failing") or torch.zeros(2).reshape(3)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        restore_trained_model(settings, state, 0, "cpu")
    assert devices.count("failing") == 1


@pytest.mark.cuda
def test_hooks_of_a_model_and_of_components_are_captured_once_and_replayed():
    """Their Python code runs while steps warm up and while each graph is captured; their work is done in every step."""

    class Counting(Component):
        name = "counting"

        def __init__(self) -> None:
            self.done, self.calls = torch.zeros((), dtype=torch.int64, device="cuda"), []

        def prepare(self, batch):
            self.calls.append("prepare")

        def after_backward(self, step):
            self.calls.append("after_backward")

        def after_step(self, step):
            self.calls.append("after_step")
            self.done += 1

    steps, component = 20, Counting()
    trainer = replace(session().config.trainer, steps=steps)
    done = fitted(Session(bricks(), BiasedConfig(), trainer=trainer, components=[component], device="cuda"))
    assert int(done.model.count) == int(component.done) == steps
    for calls, hooks in ((done.model.calls, 3), (component.calls, 3)):
        assert len(set(calls)) == hooks
        assert 0 < len(calls) < hooks * steps
    with pytest.raises(RuntimeError, match="must be trained by a Session"):
        _ = copy.deepcopy(done.model).setup


def test_the_roulette_outlasts_times_without_a_kernel(monkeypatch, caplog):
    """While the grid changes, no working copies exist, without which no kernel marches the field on CUDA."""
    settings = preset("model=pyramid", "trainer=smoke", "trainer.roulette=0.25", device="cpu")
    run = Session(bricks(), settings)
    with monkeypatch.context() as changing:
        changing.setattr(voxelfield.RadianceField, "pyramid_density", lambda self: None)
        assert run.model.settings.roulette == 0.25
    assert run.model.settings.roulette == 0.25
    assert "all faint samples are kept" not in caplog.text
    settings = preset("model=pyramid", "trainer=smoke", "trainer.roulette=0.25", "model.geometry=24", device="cpu")
    Session(bricks(), settings)
    assert "all faint samples are kept in spite of model.roulette" in caplog.text
