"""What a run is told: every configuration file is valid, and a mistake in one is reported by its key."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import quick_presets
import torch
from omegaconf import OmegaConf

from voxelfield.components.hidden_cells import HiddenCellSettings
from voxelfield.foundation import constants
from voxelfield.models import pyramid
from voxelfield.models.dense import DenseConfig
from voxelfield.models.model_config import MAX_DEGREE
from voxelfield.models.pyramid import PyramidConfig
from voxelfield.models.sh import SHConfig
from voxelfield.settings import (
    CameraConfig,
    DataConfig,
    LoggerConfig,
    LossConfig,
    OccupancyConfig,
    OptimizerConfig,
    RunConfig,
    SceneConfig,
    StageConfig,
    TrainerConfig,
    compose,
    parse,
    preset,
    resolve,
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SCHEMAS = {"trainer": TrainerConfig, "optimizer": OptimizerConfig, "camera": CameraConfig}

GROUPS = (*SCHEMAS, "logger")


def names(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


def composed(*overrides: str, name: str = "train"):
    return quick_presets.compose(*overrides, name=name)


def parsed(group: str, *overrides: str):
    return parse(SCHEMAS[group], composed(*overrides)[group], group)


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in SCHEMAS for name in names(group)])
def test_every_file_fits_its_schema(group, name):
    assert isinstance(parsed(group, f"{group}={name}"), SCHEMAS[group])


@pytest.mark.parametrize("name", ["train", "train_cpu"])
@pytest.mark.parametrize(("group", "choice"), [(group, name) for group in ("scene", "logger") for name in names(group)])
def test_a_scene_or_a_logger_changes_its_own_settings_only(group, choice, name):
    """So that a composition with another one needs nothing but its settings put in."""
    plain, chosen = compose(name=name), compose(f"{group}={choice}", name=name)
    assert {key for key in plain if plain[key] != chosen[key]} <= {group}
    assert plain.keys() == chosen.keys()


# Of those that begin with train_cpu, which differs from train in these two choices alone, each choice once.
@pytest.mark.parametrize(
    ("trainer", "model", "name"),
    [
        *itertools.product(names("trainer"), names("model"), ["train"]),
        *zip(names("trainer"), itertools.cycle(names("model")), itertools.repeat("train_cpu"), strict=False),
    ],
)
def test_every_composition_is_valid(trainer, model, name):
    config = compose(f"model={model}", f"trainer={trainer}", name=name)
    for scene, log in zip(names("scene"), itertools.cycle(names("logger")), strict=False):
        config.scene, config.logger = composed(f"scene={scene}").scene, composed(f"logger={log}").logger
        settings = parse(RunConfig, config)
        assert settings.model.kind == model
        assert [name for name in names("logger") if getattr(settings.logger, name, False)] == [log] * (log != "none")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model=sh", "trainer.steps=5", "seed=3", "model.degree=1"),
        ("model=dense", "model=pyramid", "trainer=cpu", "trainer=smoke", "device=cuda"),
        (
            "model=pyramid",
            "trainer.stages=[{step: 0, resolution: 8}, {step: 5, resolutoin: 9}]",
            "model.resolutions=[4,8]",
        ),
        ("scene=lego", "scene.aabb=[[0,0,0],[1,1,0]]", "scene.name='with spaces, [and] more'", "data.root=a/b"),
        ("+trainer.stepz=3", "++sed=1", "+model.density.initiall=1", "trainer.image_size=null", "logger=none"),
        ("camera=refine", "camera.stages=[]", "trainer.steps=${oc.env:STEPS}", "trainer.rates.betas=[0.5, b]"),
    ],
)
def test_quick_compositions_are_those_of_hydra(overrides, monkeypatch):
    monkeypatch.setenv("STEPS", "30")
    for name in ("train", "train_cpu"):
        expected, found = compose(*overrides, name=name), quick_presets.compose(*overrides, name=name)
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
        assert found == expected


def test_the_configuration_for_a_machine_without_gpu_differs_in_trainer_and_model_only():
    gpu, cpu = composed(), composed(name="train_cpu")
    assert parse(TrainerConfig, cpu.trainer, "trainer").steps < parse(TrainerConfig, gpu.trainer, "trainer").steps
    assert (gpu.model.kind, cpu.model.kind) == ("pyramid", "dense")
    differing = {key for key in gpu if gpu[key] != cpu[key]}
    # a model brings its optimizer's settings along
    assert differing == {"trainer", "model", "optimizer"}


@pytest.mark.parametrize("name", ["train", "train_cpu"])
def test_a_model_brings_its_optimizers_settings(name):
    for model, rate in (("pyramid", 0.02), ("dense", 0.2), ("sh", 0.1)):
        assert composed(f"model={model}", name=name).optimizer.grid_lr == rate
        assert composed(f"model={model}", "optimizer.grid_lr=7", name=name).optimizer.grid_lr == 7


def test_refinement_is_off_by_default_and_its_file_only_turns_it_on():
    assert preset().camera == CameraConfig()
    assert parsed("camera", "camera=refine") == CameraConfig(name="refine")


def test_a_grid_of_several_resolutions_needs_scaled_gradients_in_16_bits():
    config = parsed("trainer")
    assert config.precision == "float16"
    assert config.loss_scale > 1


@pytest.mark.parametrize("name", ["train", "train_cpu"])
def test_every_setting_is_composed_whether_a_file_states_it_or_not(name):
    """So that it can be set and referred to: a new setting only needs its line in a dataclass."""

    def compare(composed: object, settings: object) -> None:
        if not dataclasses.is_dataclass(settings):
            return
        assert set(composed) == {field.name for field in dataclasses.fields(settings)}
        for key in composed:
            compare(composed[key], getattr(settings, key))

    for model in names("model"):
        config = compose(f"model={model}", name=name)
        compare(config, parse(RunConfig, config))


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS for name in names(group)])
def test_a_file_states_nothing_that_is_the_default_anyway(group, name):
    def restated(stated: dict, default: dict) -> list[str]:
        pairs = [(key, value, default[key]) for key, value in stated.items()]
        return [key for key, *two in pairs if (restated(*two) if isinstance(two[0], dict) else two[0] == two[1])]

    stated = OmegaConf.to_container(OmegaConf.load(CONFIGS / group / f"{name}.yaml"))
    bases = [base for base in stated.pop("defaults", ()) if base != "_self_"]
    default = composed(f"{group}={bases[0]}")[group] if bases else dataclasses.asdict(RunConfig())[group]
    assert restated(stated, OmegaConf.to_container(OmegaConf.create(default))) == []


def test_a_setting_that_no_file_mentions_can_be_set():
    assert not any("sparsity" in file.read_text(encoding="utf-8") for file in CONFIGS.rglob("*.yaml"))
    assert preset("trainer=default", "trainer.loss.sparsity=2").trainer.loss.sparsity == 2.0
    assert preset("trainer.loss.opacity_entropy=${trainer.loss.sparsity}").trainer.loss.opacity_entropy == 0.0
    with pytest.raises(ValueError, match=r"^trainer\.loss\.sparsity must be at least 0, got -1\.0$"):
        preset("trainer=default", "trainer.loss.sparsity=-1")


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


def refusal(*overrides: str) -> str:
    """What a run says of its configuration, in one line."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        quick_presets.preset(*overrides, name="train")
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # Keys that there are not.
        ("+trainer.stepz=3", "configuration has no key trainer.stepz; did you mean trainer.steps?"),
        ("+model.wdith=128", "configuration has no key model.wdith; did you mean model.width?"),
        ("+sed=1", "configuration has no key sed; did you mean seed?"),
        (
            "+trainer.loss.sparsitty=1",
            "configuration has no key trainer.loss.sparsitty; did you mean trainer.loss.sparsity?",
        ),
        (
            "+model.density.initiall=1",
            "configuration has no key model.density.initiall; did you mean model.density.initial?",
        ),
        (
            "+data.x=1",
            "configuration has no key data.x; "
            "data has downscale, holdout, missing_images, invert_masks, soft_masks, lens_distortion, root, download",
        ),
        (
            "trainer.stages=[{step: 0, resolution: 8}, {step: 5, resolutoin: 9}]",
            "configuration has no key trainer.stages[1].resolutoin; did you mean trainer.stages[1].resolution?",
        ),
        ("trainer.stages=[{step: 0, resolution: 8}, {step: 5}]", "configuration lacks trainer.stages[1].resolution"),
        # Values of the wrong type.
        ("trainer.steps=many", "trainer.steps must be an integer, got 'many'"),
        ("trainer.steps=1.5", "trainer.steps must be an integer, got 1.5"),
        ("trainer.steps=true", "trainer.steps must be an integer, got True"),
        ("trainer.steps=null", "trainer.steps must be an integer, got null"),
        ("trainer.steps=???", "trainer.steps must be an integer, got '???'"),
        ("trainer.loss.sparsity=abc", "trainer.loss.sparsity must be a number, got 'abc'"),
        ("trainer.image_size=big", "trainer.image_size must be an integer, or null, got 'big'"),
        ("trainer.stages=8", "trainer.stages must be a list of mappings, got 8"),
        ("trainer.stages=[8]", "trainer.stages[0] must be a mapping of step, resolution, crop, got 8"),
        (
            "trainer.stages=[{step: 0, resolution: fine}]",
            "trainer.stages[0].resolution must be an integer, got 'fine'",
        ),
        ("trainer.rates.betas=[0.9, b]", "trainer.rates.betas[1] must be a number, got 'b'"),
        ("trainer.rates.betas=[0.9]", "trainer.rates.betas must be a list of 2 numbers, got [0.9]"),
        ("model.resolutions=16", "model.resolutions must be a list of integers, got 16"),
        ("scene.aabb=[[0,0,0]]", "scene.aabb must be a list of 2 lists of 3 numbers, or null, got [[0, 0, 0]]"),
        ("data.download=perhaps", "data.download must be true or false, got 'perhaps'"),
        ("data.root=[]", "data.root must be text, got []"),
        ("devices=[]", "devices must be text, or null, got []"),
        # Values that make no sense.
        ("trainer.background=red", "trainer.background must be one of random, white, black, got 'red'"),
        ("trainer.steps=0", "trainer.steps must be at least 1, got 0"),
        ("trainer.image_size=-2", "trainer.image_size must be at least 1, or null, got -2"),
        (
            "trainer.supersampling=1000",
            "trainer.max_rays must be at least trainer.supersampling**2 = 1000000, the rays of a pixel, got 524288",
        ),
        (
            "trainer.patches=3000",
            "trainer.patches must have room in trainer.max_rays = 524288 rays, in early steps 0.25 of them "
            "(trainer.small_batches), got 3000 patches of 768000 pixels",
        ),
        ("trainer.loss_scale=0", "trainer.loss_scale must be positive, got 0.0"),
        ("trainer.loss_scale=nan", "trainer.loss_scale must be positive and finite, got nan"),
        ("trainer.loss.sparsity=1e39", "trainer.loss.sparsity must be a number of at most 3.4e+38, got 1e+39"),
        ("trainer.loss.sparsity=inf", "trainer.loss.sparsity must be at least 0 and finite, got inf"),
        ("trainer.render.min_weight=7", "trainer.render.min_weight must lie in [0, 1), got 7.0"),
        ("trainer.occupancy.threshold=2", "trainer.occupancy.threshold must lie in (0, 1), got 2.0"),
        ("trainer.evaluation.views=0", "trainer.evaluation.views must be at least 1, or null, got 0"),
        ("trainer.rates.final_factor=0", "trainer.rates.final_factor must lie in (0, 1], got 0.0"),
        ("trainer.rates.betas=[1.5,2]", "trainer.rates.betas[0] must lie in [0, 1), got 1.5"),
        ("trainer.stages=[]", "trainer.stages must start at step 0 and have rising steps, got steps []"),
        (
            "trainer.stages=[{step: 1, resolution: 8}]",
            "trainer.stages must start at step 0 and have rising steps, got steps [1]",
        ),
        ("trainer.stages=[{step: 0, resolution: 1}]", "trainer.stages[0].resolution must be at least 2, got 1"),
        (
            "trainer.finest_resolution=200",
            "trainer.stages must not become coarser without a crop (in the presets, "
            "trainer.finest_resolution is one of them), got resolutions [64, 128, 256, 200]",
        ),
        ("model.kind=tree", "model.kind must be one of pyramid, sh, dense, got 'tree'"),
        ("model.view_degree=4", "model.view_degree must lie in [0, 3], got 4"),
        ("model.geometry=120", "model.geometry must be at most 112 with model.view_degree=3, got 120"),
        ("model.channels=50", "model.channels must be at most 21 with 6 levels, got 50"),
        ("model.resolutions=[]", "model.resolutions must rise from at least 2, got []"),
        ("model.resolutions=[8,4]", "model.resolutions must rise from at least 2, got [8, 4]"),
        ("logger.wandb=maybe", "logger.wandb must be true or false, got 'maybe'"),
        ("data.missing_images=maybe", "data.missing_images must be one of error, skip, or null, got 'maybe'"),
        ("device=banana", "device must be auto, cpu, cuda or cuda:<index>, got 'banana'"),
        ("devices=two", "devices must be all or a number from 1, or null, got 'two'"),
        ("devices=auto", "devices must be all or a number from 1, got auto: leave it out for one process"),
        (
            "scene.aabb=[[0,0,0],[1,1,0]]",
            "scene.aabb must be finite with low < high along every axis, got [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]",
        ),
    ],
)
def test_what_no_run_can_be_told_is_refused_in_one_line(override, message):
    assert refusal(override) == message


def test_levels_that_are_added_up_divide_one_another():
    assert refusal("model=sh", "model.resolutions=[40,100]") == (
        "model.resolutions of levels that are added up must each be a whole multiple of the one before, got [40, 100]"
    )


def test_view_dependence_ends_at_a_level():
    settings = preset("model=sh", "model.resolutions=[4,8,16]", "model.view_resolution=9", "model.degree=1")
    grid = settings.model.build(torch.tensor([[-1.0] * 3, [1.0] * 3]), [16], "cpu").grid
    assert [level.shape[3] for level in grid.levels] == [13, 13, 4]
    # Density, and the constant harmonic of each colour.
    assert grid.combination.channels == (None, None, (0, 1, 5, 9))
    coarse = preset("model=sh", "model.resolutions=[4,8]", "model.view_resolution=2")
    grid = coarse.model.build(torch.tensor([[-1.0] * 3, [1.0] * 3]), [8], "cpu").grid
    assert [level.shape[3] for level in grid.levels] == [28, 4]
    constant = preset("model=sh", "model.resolutions=[4,8]", "model.view_resolution=4", "model.degree=0")
    grid = constant.model.build(torch.tensor([[-1.0] * 3, [1.0] * 3]), [8], "cpu").grid
    assert grid.combination.channels == ()


def test_an_interpolation_that_leads_nowhere_is_named():
    config = composed()
    config.trainer.steps = "${trainer.stepz}"
    with pytest.raises(ValueError, match=r"^trainer\.steps cannot be resolved: "):
        parse(RunConfig, config)


def test_text_from_the_environment_is_a_number(monkeypatch):
    monkeypatch.setenv("STEPS", "30")
    assert preset("trainer.steps=${oc.env:STEPS}", name="train").trainer.steps == 30


# ------------------------------------------------------------------------------------------------------- defaults

SCHEMAS_OF_A_RUN = (
    SceneConfig,
    DataConfig,
    PyramidConfig,
    SHConfig,
    OptimizerConfig,
    TrainerConfig,
    LoggerConfig,
    RunConfig,
)


@pytest.mark.parametrize("schema", SCHEMAS_OF_A_RUN)
def test_defaults_alone_make_sense(schema):
    assert parse(schema, {}) == schema() == parse(schema, schema())


def test_defaults_are_what_trains_lego_on_a_gpu():
    settings = preset("scene=lego", name="train")
    assert settings == RunConfig(logger=LoggerConfig(tensorboard=True)), "files turn loggers on, to be combined"


@pytest.mark.parametrize(("name", "schema"), [("pyramid", PyramidConfig), ("sh", SHConfig), ("dense", DenseConfig)])
def test_defaults_of_models_are_those_of_their_files_and_build(name, schema):
    assert preset(f"model={name}", name="train").model == schema()
    settings = RunConfig(model=schema())
    field = settings.model.build(torch.tensor(settings.scene.aabb), settings.trainer.resolutions, "meta")
    assert field.grid.channels == {"pyramid": 24, "sh": 28, "dense": 12}[name]


def test_faint_samples_of_photographs_are_kept_at_random():
    for trainer, roulette in (("many_photographs", 0.01), ("few_photographs", 0.01), ("default", 0.0)):
        assert preset(f"trainer={trainer}", "model=pyramid").model.roulette == roulette
    with pytest.raises(ValueError, match=r"^trainer\.roulette must lie in \[0, 1\], got 1\.5$"):
        preset("trainer.roulette=1.5")


def test_an_instance_is_checked_as_a_file_is():
    with pytest.raises(ValueError, match=r"^trainer\.loss\.sparsity must be at least 0, got -1\.0$"):
        parse(RunConfig, RunConfig(trainer=TrainerConfig(loss=LossConfig(sparsity=-1))))


def test_limits_are_those_of_the_compiled_ops():
    for name in ("MAX_WIDTH", "MAX_LAYERS", "MAX_LEVELS"):
        assert getattr(pyramid, name) == getattr(constants, name)
    assert MAX_DEGREE == constants.MAX_DEGREE


@pytest.mark.parametrize("steps", [(0, 5, 5), (0, 9, 5)])
def test_the_steps_of_stages_must_rise(steps):
    stages = ", ".join(f"{{step: {step}, resolution: 8}}" for step in steps)
    expected = f"trainer.stages must start at step 0 and have rising steps, got steps {list(steps)}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        parsed("trainer", f"trainer.stages=[{stages}]")


@pytest.mark.parametrize(
    ("idle", "used"),
    [
        ("loss.robust_cells=30", "loss.robust=4"),
        ("loss.exposure=0.1", "exposure=affine"),
        ("loss.tones=0", "vignetting=true"),
    ],
)
def test_settings_of_what_is_off_are_refused(idle, used):
    key, value = idle.split("=")
    with pytest.raises(ValueError, match=rf"^trainer\.{key} must be left at .* got {value}: it would be ignored$"):
        quick_presets.preset(f"trainer.{idle}", name="train")
    quick_presets.preset(f"trainer.{idle}", f"trainer.{used}", name="train")


def test_parsing_leaves_the_composed_configuration_alone():
    config = composed()
    before = OmegaConf.to_yaml(config)
    parse(TrainerConfig, config.trainer, "trainer").steps = 1
    assert OmegaConf.to_yaml(config) == before


def test_rays_that_miss_the_scene_do_not_count():
    trainer = preset("trainer.max_rays=1000", name="train").trainer
    assert trainer.with_rays_that_miss(0.5) is trainer
    for share, expected in ((0.3, 3334), (0.0, 4000)):
        settled = trainer.with_rays_that_miss(share)
        assert settled == dataclasses.replace(trainer, max_rays=expected, extra_rays=False)
        assert settled.with_rays_that_miss(share) is settled


def test_the_preset_of_a_scene_keeps_what_another_file_has_set(monkeypatch):
    monkeypatch.setattr(resolve, "trainer_for", lambda *_, **__: "many_photographs")
    config = compose("trainer=auto", name="train")
    config.trainer.steps = 500  # as a file of the user does
    chosen = resolve.AutoTrainer(config, [], "pyramid").choose(parse(RunConfig, config), None, None)
    assert chosen.trainer.steps == 500
    assert chosen.trainer.sparse_resolutions == [480, 960]


@pytest.mark.parametrize(
    ("share", "steps", "last", "step"),
    [
        (0.0, 900, 70, None),
        (0.5, 900, 70, 450),
        (0.1, 150, 20, 100),
        (0.2, 501, 70, 140),
        (0.999, 200, 70, 199),
        (0.5, 900, 460, None),
        (0.5, 900, 900, 450),
        (0.5, 90, 0, None),
    ],
)
def test_the_step_at_which_hidden_cells_are_emptied(share, steps, last, step):
    stages = [StageConfig(0, 8, crop=True), *([StageConfig(last, 9)] if last > 0 else [])]
    hidden = HiddenCellSettings(hidden_at=share)
    trainer = TrainerConfig(steps=steps, stages=stages, occupancy=OccupancyConfig(start=100))
    found = hidden.step(trainer) if hidden.is_on else steps
    assert found == step if step is not None else found >= steps


def test_several_devices_share_a_batch_or_scale_it():
    trainer = preset("trainer=many_photographs", "trainer.steps=9200", "trainer.average_steps=100").trainer
    assert trainer.scaled(4) is trainer
    assert dataclasses.replace(trainer, scaling="steps").scaled(1) == dataclasses.replace(trainer, scaling="steps")
    larger = dataclasses.replace(trainer, scaling="batch").scaled(4)
    assert larger.visible_samples == 4 * trainer.visible_samples
    batch = ("max_rays", "patches", "visible_samples", "candidate_samples")
    assert dataclasses.replace(larger, **{name: getattr(trainer, name) for name in batch}) == trainer
    fewer = dataclasses.replace(trainer, scaling="steps").scaled(4)
    assert (fewer.steps, fewer.average_steps, fewer.visible_samples) == (2300, 25, larger.visible_samples)
    assert [stage.step for stage in fewer.stages] == [stage.step // 4 for stage in trainer.stages]
    assert fewer.occupancy.every == trainer.occupancy.every // 4
    assert fewer.rates.grid == pytest.approx(2 * trainer.rates.grid)
    assert fewer.scaled(4) == fewer, "scaled once"
