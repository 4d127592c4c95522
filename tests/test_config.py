"""What a run is told: every configuration file is valid, and a mistake in one is reported by its key."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from voxelfield.training.config import OptimizerConfig, StageConfig, TrainerConfig, parse

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SCHEMAS = {"trainer": TrainerConfig, "optimizer": OptimizerConfig}


def names(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


def composed(*overrides: str, name: str = "train"):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def parsed(group: str, *overrides: str):
    return parse(SCHEMAS[group], composed(*overrides)[group], group)


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in ("trainer", "optimizer") for name in names(group)]
)
def test_every_file_fits_its_schema(group, name):
    assert isinstance(parsed(group, f"{group}={name}"), SCHEMAS[group])


@pytest.mark.parametrize(("group", "name"), [(g, n) for g in ("scene", "model", "logger") for n in names(g)])
def test_every_choice_of_the_other_groups_composes(group, name):
    assert composed(f"{group}={name}")[group]


def test_the_configuration_for_a_machine_without_gpu_differs_in_trainer_and_model_only():
    gpu, cpu = composed(), composed(name="train_cpu")
    assert parse(TrainerConfig, cpu.trainer, "trainer").steps < parse(TrainerConfig, gpu.trainer, "trainer").steps
    assert (gpu.model.kind, cpu.model.kind) == ("pyramid", "mlp")
    differing = {key for key in gpu if gpu[key] != cpu[key]}
    # a model brings its optimizer's settings along
    assert differing == {"trainer", "model", "optimizer"}


@pytest.mark.parametrize("name", ["train", "train_cpu"])
def test_a_model_brings_its_optimizers_settings(name):
    for model, rate in (("pyramid", 0.02), ("mlp", 0.2), ("sh", 0.1)):
        assert composed(f"model={model}", name=name).optimizer.grid_lr == rate
        assert composed(f"model={model}", "optimizer.grid_lr=7", name=name).optimizer.grid_lr == 7


@pytest.mark.parametrize("name", names("trainer"))
def test_every_preset_lists_every_setting(name):
    # Hydra lets users override only what a file mentions.
    assert set(composed(f"trainer={name}").trainer) == {field.name for field in dataclasses.fields(TrainerConfig)}


@pytest.mark.parametrize("name", names("optimizer"))
def test_every_optimizer_lists_every_setting(name):
    assert set(composed(f"optimizer={name}").optimizer) == {field.name for field in dataclasses.fields(OptimizerConfig)}


def test_a_grid_of_several_resolutions_needs_scaled_gradients_in_16_bits():
    config = parsed("trainer")
    assert config.precision == "float16"
    assert config.loss_scale > 1


def test_values_become_typed_objects():
    config = parsed(
        "trainer",
        "trainer=cpu",
        "trainer.stages=[{step: 0, resolution: 8}, {step: 30, resolution: 16, crop: true}]",
        "trainer.render.min_weight=0",
        "trainer.image_size=null",
        "trainer.precision=bfloat16",
    )
    assert config.stages == [StageConfig(0, 8, False), StageConfig(30, 16, True)]
    assert config.render.min_weight == 0.0
    assert isinstance(config.render.min_weight, float)
    assert config.image_size is None
    assert config.precision == "bfloat16"
    rates = parsed("trainer", "trainer.rates.betas=[0.5, 0.75]", "trainer.rates.grid=2").rates
    assert tuple(rates.betas) == (0.5, 0.75)
    assert rates.grid == 2.0
    assert isinstance(rates.grid, float)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+trainer.stepz=3", "stepz"),
        ("+trainer.loss.sparsitty=1", "loss.sparsitty"),
        ("+optimizer.lr=1", "lr"),
        ("~trainer.steps", "steps"),
        ("~trainer.loss.sparsity", "loss.sparsity"),
        ("trainer.stages=[{step: 0, resolution: 8}, {step: 5}]", "stages[1].resolution"),
        ("trainer.steps=many", "steps"),
        ("trainer.steps=1.5", "steps"),
        ("trainer.steps=null", "steps"),
        ("trainer.loss.sparsity=abc", "loss.sparsity"),
        ("trainer.stages=8", "stages"),
        ("trainer.stages=[8]", "stages[0]"),
        ("trainer.stages=[{step: 0, resolution: fine}]", "resolution"),
        ("optimizer.grid_lr=fast", "grid_lr"),
        ("trainer.rates.betas=[0.9, b]", "rates.betas[1]"),
    ],
)
def test_unknown_missing_and_mistyped_keys_are_named(override, key):
    group = "optimizer" if "optimizer" in override else "trainer"
    with pytest.raises(ValueError, match=f"^configuration of {group}: ") as caught:
        parsed(group, override)
    message = str(caught.value)
    assert message.split(": ")[1] == key
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.background=red", ["trainer.background", "random, white, black", "'red'"]),
        ("trainer.evaluation_background=random", ["trainer.evaluation_background", "white, black", "'random'"]),
        ("trainer.precision=float64", ["trainer.precision", "float32, bfloat16, float16", "'float64'"]),
        ("trainer.transfer=gamma", ["trainer.transfer", "srgb, linear", "'gamma'"]),
        ("trainer.steps=0", ["trainer.steps", "at least 1", "0"]),
        ("trainer.samples=-5", ["trainer.samples", "at least 1", "-5"]),
        ("trainer.max_rays=0", ["trainer.max_rays"]),
        ("trainer.marched=0", ["trainer.marched", "at least 1", "0"]),
        ("trainer.supersampling=1000", ["trainer.max_rays", "1000000"]),
        ("trainer.loss_scale=0", ["trainer.loss_scale", "positive", "0"]),
        ("trainer.loss_scale=nan", ["trainer.loss_scale", "positive", "nan"]),
        ("trainer.chunk=0", ["trainer.chunk"]),
        ("trainer.log_every=0", ["trainer.log_every"]),
        ("trainer.occupancy.every=0", ["trainer.occupancy.every"]),
        ("trainer.loss.tv_every=0", ["trainer.loss.tv_every"]),
        ("trainer.evaluation.views=0", ["trainer.evaluation.views"]),
        ("trainer.evaluation.supersampling=0", ["trainer.evaluation.supersampling", "at least 1", "0"]),
        ("trainer.preview_views=0", ["trainer.preview_views"]),
        ("trainer.rates.final=0", ["trainer.rates.final", "positive", "0.0"]),
        ("trainer.average_steps=-1", ["trainer.average_steps", "negative", "-1"]),
        ("optimizer.grid_lr=-1", ["optimizer.grid_lr", "positive", "-1.0"]),
        ("optimizer.view_lr=0", ["optimizer.view_lr", "positive", "0.0"]),
        ("optimizer.network_lr=nan", ["optimizer.network_lr", "positive", "nan"]),
        ("trainer.rates.betas=[0.9]", ["trainer.rates.betas", "[0.9]"]),
        ("trainer.stages=[]", ["trainer.stages", "step 0", "[]"]),
        ("trainer.stages=[{step: 1, resolution: 8}]", ["trainer.stages", "step 0", "[1]"]),
        ("trainer.stages=[{step: 0, resolution: 1}]", ["trainer.stages", "at least 2"]),
        ("trainer.finest=200", ["trainer.stages", "coarser", "trainer.finest", "[64, 128, 256, 200]"]),
    ],
)
def test_values_that_make_no_sense_are_refused(override, words):
    group = "optimizer" if "optimizer" in override else "trainer"
    with pytest.raises(ValueError, match=f"^configuration of {group}: ") as caught:
        parsed(group, override)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("steps", [(0, 5, 5), (0, 9, 5)])
def test_the_steps_of_stages_must_rise(steps):
    stages = ", ".join(f"{{step: {step}, resolution: 8}}" for step in steps)
    expected = f"trainer.stages must start at step 0 and have rising steps, got steps {list(steps)}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        parsed("trainer", f"trainer.stages=[{stages}]")


def test_no_preview_needs_no_views():
    assert parsed("trainer", "trainer.preview_every=0", "trainer.preview_views=0").preview_views == 0


def test_parsing_leaves_the_composed_configuration_alone():
    config = composed()
    before = OmegaConf.to_yaml(config)
    parse(TrainerConfig, config.trainer, "trainer").steps = 1
    assert OmegaConf.to_yaml(config) == before
