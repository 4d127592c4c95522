"""The training loop on tiny grids and a scene of 25x25 pixels: it learns, grows, stops, resumes and complains."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.nn import functional as F

from voxelfield import VoxelGrid
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.scene import Scene, Split
from voxelfield.fields.field import RadianceField
from voxelfield.grids.uniform_noise import UniformNoise
from voxelfield.rendering.render import render_view
from voxelfield.training import graph, optimizer, sparse
from voxelfield.training import trainer as trainer_module
from voxelfield.training.checkpoint import load_checkpoint
from voxelfield.training.config import OptimizerConfig, RunConfig, parse
from voxelfield.training.logging import NullLogger
from voxelfield.training.trainer import EmptyFieldError, Trainer

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "lego"

# What every trainer here starts from; a test overrides what it is about.
TINY = (
    "trainer=smoke",
    "trainer.steps=10",
    "trainer.visible_samples=4096",
    "trainer.log_every=1",
    "trainer.preview_every=0",
    "trainer.checkpoint_every=0",
    "trainer.stages=[{step: 0, resolution: 12}]",
    "trainer.occupancy.resolution=12",
    "trainer.occupancy.start=1000",
    "trainer.occupancy.every=2",
)
# On CUDA its networks run in 16 bits whatever the precision: their gradients must not underflow.
PYRAMID = ("model=pyramid", "model.resolutions=[4,8,12]", "model.width=16", "trainer.loss_scale=4096")
SUM = ("model=sh", "model.resolutions=[3,6,12]")
MLP = ("model=mlp",)
# Total variation in every step; of a single grid.
VARIATION = tuple(f"trainer.loss.{s}" for s in ("tv_density=1e-3", "tv_color=1e-3", "tv_every=1", "tv_until=8"))
MODELS = pytest.mark.parametrize("model", [MLP, SUM, PYRAMID], ids=["mlp", "sh", "pyramid"])


class Recorder(NullLogger):
    """Keeps scalars; calls ``watch`` with each batch of them while training stands still."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.watch = None

    def scalars(self, step, values) -> None:
        self.records.append((step, dict(values)))
        if self.watch is not None:
            self.watch(step, values)

    def series(self, tag: str) -> list[tuple[int, float]]:
        return [(step, values[tag]) for step, values in self.records if tag in values]


@pytest.fixture(autouse=True)
def _one_thread():
    """Work this small gains nothing from threads, and beside a busy process their waiting costs tenfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def fixture_aabb() -> Tensor:
    return torch.tensor([[-1.5] * 3, [1.5] * 3])


@pytest.fixture(scope="module")
def scene(fixture_aabb) -> Scene:
    return load_blender(FIXTURE, downscale=4, aabb=fixture_aabb)


@pytest.fixture
def make_trainer(scene, tmp_path):
    def make(
        *overrides: str,
        device: torch.device | str = "cpu",
        folder: str = "run",
        seed: int = 0,
        split: Split = scene.train,
    ) -> Trainer:
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            config = compose("train_cpu", overrides=[*TINY, *overrides])
        settings = parse(RunConfig, config)
        torch.manual_seed(seed)
        field = settings.model.build(scene.aabb, settings.trainer.resolutions, "cpu").to(device)
        run_directory = tmp_path / folder
        return Trainer(
            field,
            settings.model,
            split,
            settings.trainer,
            settings.optimizer,
            Recorder(),
            run_directory,
            {"note": folder},
        )

    return make


def moments(trainer: Trainer) -> dict[str, Any]:
    return trainer.optimizers.grid.state[trainer.field.grid.features]


def differences(first: Any, second: Any, name: str = "state") -> list[str]:
    """Names of the leaves at which two checkpoints differ in the least bit."""
    if isinstance(first, Tensor):
        same = first.shape == second.shape and torch.equal(first, second)
        return [] if same else [name]
    if isinstance(first, dict):
        assert first.keys() == second.keys(), name
        return [leaf for key in first for leaf in differences(first[key], second[key], f"{name}.{key}")]
    if isinstance(first, (list, tuple)):
        assert len(first) == len(second), name
        pairs = enumerate(zip(first, second, strict=True))
        return [leaf for index, (a, b) in pairs for leaf in differences(a, b, f"{name}[{index}]")]
    return [] if first == second else [name]


# --------------------------------------------------------------------------------------------------- learning


@MODELS
def test_the_error_falls(make_trainer, device, model):
    trainer = make_trainer(*model, "trainer.steps=80", "trainer.occupancy.start=30", device=device)
    assert trainer.fit()
    losses = [value for _, value in trainer.log.series("loss/photometric")]
    assert len(losses) == 80
    assert fmean(losses[-10:]) < 0.5 * fmean(losses[:10])
    assert trainer.train_seconds > 0
    psnr = [value for _, value in trainer.log.series("train/psnr")]
    assert psnr == pytest.approx((-10 * torch.tensor(losses).log10()).tolist(), rel=1e-4)


@MODELS
def test_pixels_that_are_means_of_rays_are_learned(make_trainer, device, model):
    options = ("trainer.supersampling=2", "trainer.max_rays=255", "trainer.steps=80", "trainer.occupancy.start=30")
    # On CUDA as many rays as configured are drawn in every step, and with room for all samples each of them counts.
    room = ("trainer.visible_samples=65536",) if device.type == "cuda" else ()
    trainer = make_trainer(*model, *options, *room, device=device)
    assert trainer.fit()
    losses = [value for _, value in trainer.log.series("loss/photometric")]
    assert fmean(losses[-10:]) < 0.5 * fmean(losses[:10])
    rays = {value for _, value in trainer.log.series("train/rays_per_step")}
    assert all(number % 4 == 0 and number <= 252 for number in rays)
    assert rays == {252} if device.type == "cuda" else len(rays) > 1


@pytest.mark.parametrize(("side", "differs"), [(1, False), (2, True)])
def test_rays_of_a_pixel_are_averaged_as_configured(make_trainer, side, differs):
    losses = []
    for transfer in ("srgb", "linear"):
        options = ("trainer.steps=1", f"trainer.supersampling={side}", f"trainer.transfer={transfer}")
        trainer = make_trainer(*PYRAMID, *options)
        trainer.fit()
        losses += [value for _, value in trainer.log.series("loss/photometric")]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert (losses[0] != losses[1]) == differs


@MODELS
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_learns_and_leaves_parameters_in_float32(make_trainer, device, precision, model):
    options = ("trainer.steps=4", "trainer.visible_samples=1024", f"trainer.precision={precision}")
    trainer = make_trainer(*model, *options, "trainer.loss_scale=1024", device=device)
    before = [parameter.detach().clone() for parameter in trainer.field.parameters()]
    assert trainer.fit()
    for parameter, old in zip(trainer.field.parameters(), before, strict=True):
        assert parameter.dtype == torch.float32
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, old)


@MODELS
def test_the_scale_of_the_loss_does_not_matter(make_trainer, model):
    fields = []
    for scale in (1, 4096):
        # Adam's floor is the one thing that does not scale along.
        options = (f"trainer.loss_scale={scale}", f"optimizer.eps={1e-10 * scale}")
        trainer = make_trainer(*model, *(VARIATION if model == MLP else ()), *options)
        trainer.fit()
        fields.append(trainer.field)
    for one, other in zip(*(field.parameters() for field in fields), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("background", "expected"),
    [
        # with 8-bit opacity a and colours c, an empty field is off by a * (c - background)
        ("white", lambda c: (c - 1) ** 2),
        ("black", lambda c: c**2),
        ("random", lambda c: c**2 - c + 1 / 3),  # the mean over backgrounds in [0, 1]
    ],
)
def test_rendering_and_truth_share_their_background(make_trainer, scene, background, expected):
    pixel = torch.tensor([204, 102, 0, 128], dtype=torch.uint8)
    images = pixel.expand_as(scene.train.images).contiguous()
    trainer = make_trainer(
        f"trainer.background={background}",
        "trainer.steps=1",
        "trainer.visible_samples=1000000",
        split=Split(images, scene.train.cameras, scene.train.names),
    )
    with torch.no_grad():
        trainer.field.grid.features[..., 0] = -30.0
    trainer.fit()
    ((_, loss),) = trainer.log.series("loss/photometric")
    mean = fmean(expected(c) for c in (0.8, 0.4, 0.0))
    # over 4096 rays the average of random backgrounds is within a few percent
    assert loss == pytest.approx((128 / 255) ** 2 * mean, rel=0.1 if background == "random" else 1e-3)


def test_learning_rates_decay_to_the_configured_share(make_trainer):
    trainer = make_trainer("trainer.rates.final_factor=0.01", "optimizer.grid_lr=0.5", "optimizer.network_lr=0.25")
    trainer.fit()
    grid, network = trainer.log.series("lr/grid"), trainer.log.series("lr/network")
    # the record of step k is that of the k-th update, which starts from step k - 1
    # rates are float32 on the device
    assert grid == [(k, pytest.approx(0.5 * 0.01 ** ((k - 1) / 10), rel=1e-5)) for k in range(1, 11)]
    assert network == [(k, pytest.approx(0.25 * 0.01 ** ((k - 1) / 10), rel=1e-5)) for k in range(1, 11)]


def test_every_weighted_term_is_logged_and_the_rest_is_not(make_trainer):
    weights = ("sample_rgb=0.1", "opacity_entropy=0.1", "sparsity=0.1", "tv_density=0.1", "tv_color=0.1", "tv_until=4")
    trainer = make_trainer(*(f"trainer.loss.{weight}" for weight in weights), "trainer.loss.tv_every=2")
    trainer.fit()
    rendered = {"loss/photometric", "loss/sample_rgb", "loss/opacity_entropy", "loss/sparsity"}
    grid = {"loss/tv_density", "loss/tv_color"}
    logged = {
        step: {tag for tag in values if tag.startswith("loss/")}
        for step, values in trainer.log.records
        if "train/psnr" in values
    }
    assert logged == dict.fromkeys(range(1, 11), rendered | grid)
    # total variation is due at steps 0 and 2, whose records are those of the updates 1 and 3
    assert {k for k, value in trainer.log.series("loss/tv_color") if value > 0} == {1, 3}


def test_a_record_is_the_mean_since_the_last_one(make_trainer):
    single = make_trainer()
    single.fit()
    every_four = make_trainer("trainer.log_every=4")
    every_four.fit()
    for tag in ("loss/photometric", "loss/sample_rgb", "train/rays_per_step"):
        values = [value for _, value in single.log.series(tag)]
        expected = [(4, fmean(values[:4])), (8, fmean(values[4:8])), (10, fmean(values[8:]))]
        assert every_four.log.series(tag) == [(step, pytest.approx(mean)) for step, mean in expected]


def test_rays_are_adapted_to_the_number_of_samples(make_trainer):
    trainer = make_trainer("trainer.steps=40")
    trainer.fit()
    rays = dict(trainer.log.series("train/rays_per_step"))
    per_ray = dict(trainer.log.series("train/samples_per_ray"))
    assert rays[1] == 4096 // 64
    assert rays[40] * per_ray[40] == pytest.approx(4096, rel=0.3)
    capped = make_trainer("trainer.max_rays=100")
    capped.fit()
    assert max(value for _, value in capped.log.series("train/rays_per_step")) <= 100


# ------------------------------------------------------------------------------------------ graphs of CUDA steps

ON_CUDA = (*PYRAMID, "trainer.precision=float16", "trainer.max_rays=1024")


def fit_on_cuda(make_trainer, *overrides, watch=None):
    trainer = make_trainer(*ON_CUDA, "trainer.visible_samples=65536", *overrides, device="cuda")
    trainer.log.watch = watch
    trainer.fit()
    return trainer


@pytest.mark.cuda
def test_a_graphed_run_learns_as_one_without(make_trainer, monkeypatch):
    stages = "trainer.stages=[{step: 0, resolution: 8}, {step: 15, resolution: 12, crop: true}]"
    options = ("trainer.steps=80", "trainer.occupancy.start=10", "trainer.occupancy.every=10", stages)
    runs = []
    for warm_up in (3, 10**9):
        monkeypatch.setattr(graph, "_WARM_UP", warm_up)
        trainer = fit_on_cuda(make_trainer, *options)
        runs.append([value for _, value in trainer.log.series("loss/photometric")])
        assert len(runs[-1]) == 80
        assert fmean(runs[-1][-10:]) < 0.5 * fmean(runs[-1][:10])
    # The same pixels are drawn, but gradients are summed in any order.
    for first in range(0, 80, 10):
        graphed, single = (fmean(losses[first : first + 10]) for losses in runs)
        assert graphed == pytest.approx(single, rel=0.15), f"steps {first} to {first + 9}"


@pytest.mark.cuda
def test_a_graph_follows_occupancy(make_trainer):
    def watch(step, values):
        if step == 8:
            trainer.occupancy.restrict(corner, trainer.occupancy.aabb)

    corner = torch.zeros(12, 12, 12, dtype=torch.bool, device="cuda")
    corner[5:7, 5:7, 5:7] = True
    trainer = make_trainer(*ON_CUDA, "trainer.visible_samples=65536", "trainer.steps=12", device="cuda")
    trainer.log.watch = watch
    trainer.fit()
    samples = [value for _, value in trainer.log.series("train/samples_per_ray")]
    assert min(samples[:8]) > 0
    assert 0 < max(samples[8:]) < 0.3 * min(samples[:8])


@pytest.mark.cuda
def test_a_graph_follows_the_learning_rate(make_trainer):
    changes, last = {}, {}

    def watch(step, values):
        features = trainer.field.grid.levels[0].detach().clone()
        if last:
            changes[step] = float((features - last["features"]).abs().max())
        last["features"] = features

    trainer = make_trainer(*ON_CUDA, "trainer.steps=20", "trainer.rates.final_factor=1e-8", device="cuda")
    trainer.log.watch = watch
    trainer.fit()
    assert changes[6] > 0
    assert changes[20] < 1e-3 * changes[6]


@pytest.mark.cuda
def test_rays_that_do_not_fit_are_not_counted(make_trainer):
    roomy = fit_on_cuda(make_trainer, "trainer.visible_samples=262144", "trainer.steps=6")
    assert {value for _, value in roomy.log.series("train/rays_per_step")} == {1024}
    narrow = fit_on_cuda(make_trainer, "trainer.visible_samples=512", "trainer.steps=6")
    taken, per_ray = (dict(narrow.log.series(f"train/{tag}")) for tag in ("rays_per_step", "samples_per_ray"))
    for step in range(1, 7):
        assert 0 < taken[step] < 1024
        assert taken[step] * per_ray[step] <= 512


@pytest.mark.cuda
def test_a_resumed_run_on_cuda_draws_as_many_rays_as_configured(make_trainer):
    first = make_trainer(*PYRAMID, "trainer.steps=2")
    first.fit()
    second = make_trainer(*ON_CUDA, "trainer.steps=8", "trainer.visible_samples=262144", device="cuda")
    second.restore(load_checkpoint(first.run_directory))
    assert second.fit()
    assert {value for _, value in second.log.series("train/rays_per_step")} == {1024}


# ------------------------------------------------------------------------------------------------------ stages


def test_a_stage_refines_the_grid_and_the_optimizer_follows(make_trainer, device):
    stages = "trainer.stages=[{step: 0, resolution: 8}, {step: 3, resolution: 12}]"
    trainer = make_trainer(stages, "trainer.steps=4", device=device)
    parameter, seen = trainer.field.grid.features, {}

    def watch(step, values):
        # records of a stage come right after its change, those of a step right after the step
        state = {key: value.clone() for key, value in moments(trainer).items()} if moments(trainer) else {}
        seen[step, "stage/resolution" in values] = (parameter.detach().clone(), state)

    trainer.log.watch = watch
    assert trainer.fit()
    assert trainer.log.series("stage/resolution") == [(0, 8), (3, 12)]
    assert trainer.log.series("stage/vertices") == [(0, 8**3), (3, 12**3)]
    assert trainer.field.grid.features is parameter
    assert parameter.shape[:3] == (12, 12, 12)
    (features, old), (refined, new) = seen[3, False], seen[3, True]
    pairs = {"features": (features, refined), **{key: (old[key], new[key]) for key in ("exp_avg", "exp_avg_sq")}}
    for name, (coarse, fine) in pairs.items():
        assert coarse.shape[:3] == (8, 8, 8)
        volume = coarse.permute(3, 0, 1, 2)[None]
        expected = F.interpolate(volume, size=(12, 12, 12), mode="trilinear", align_corners=True)[0]
        torch.testing.assert_close(fine, expected.permute(1, 2, 3, 0), atol=1e-5, rtol=1e-4, msg=name)
        assert coarse.any()
    assert float(new["step"]) == float(old["step"]) == 3
    assert float(moments(trainer)["step"]) == 4
    assert trainer.settings.step == pytest.approx(0.5 * 3 / 11), "the step between samples follows the voxels"


def test_a_stage_switches_levels_on_and_crops_a_pyramid(make_trainer, device):
    stages = (
        "trainer.stages=[{step: 0, resolution: 4}, {step: 3, resolution: 8}, {step: 6, resolution: 12, crop: true}]"
    )
    trainer, changed = make_trainer(*PYRAMID, stages, "trainer.steps=8", device=device), {}
    before = [level.detach().clone() for level in trainer.field.grid.levels]

    def watch(step, values):
        if step in (3, 5):
            levels = trainer.field.grid.levels
            changed[step] = [not torch.equal(level, old) for level, old in zip(levels, before, strict=True)]
        if step == 5:
            trainer.occupancy.occupied[:4] = False

    trainer.log.watch = watch
    assert trainer.fit()
    assert changed == {3: [True, False, False], 5: [True, True, False]}
    assert trainer.field.grid.active == 3
    assert trainer.log.series("stage/resolution") == [(0, 4), (3, 8), (6, 12)]
    aabb = trainer.field.grid.aabb
    assert aabb[0, 0] == -0.5
    assert torch.equal(aabb, trainer.occupancy.aabb)
    x, y, z = trainer.field.grid.resolution
    assert x < y == z, "voxels stay cubes"
    assert trainer.settings.step == pytest.approx(0.5 * float(trainer.field.grid.voxel_size.min()))
    assert all(trainer.optimizers.grid.state[level]["exp_avg"].any() for level in trainer.field.grid.levels)


def test_a_stage_can_crop_to_what_is_occupied(make_trainer, device):
    # vertices 0.375 apart; occupancy cells coincide with the grid's
    trainer = make_trainer(
        "trainer.stages=[{step: 0, resolution: 9}, {step: 1, resolution: 7, crop: true}]",
        "trainer.steps=2",
        "trainer.occupancy.resolution=8",
        "trainer.occupancy.start=0",
        "optimizer.grid_lr=1e-3",
        device=device,
    )
    with torch.no_grad():
        density = trainer.field.grid.features[..., 0]
        density.fill_(-5.0)
        density[2:5, 2:5, 2:6] = 1.0
    assert trainer.fit()
    # cells that touch vertices 2 to 4 run from vertex 1 to 5, those that touch 2 to 5 from 1 to 6
    expected = torch.tensor([[-1.125, -1.125, -1.125], [0.375, 0.375, 0.75]], device=device)
    torch.testing.assert_close(trainer.field.grid.aabb, expected)
    torch.testing.assert_close(trainer.occupancy.aabb, expected)
    x, y, z = trainer.field.grid.resolution
    assert x == y < z, "voxels stay cubes"
    assert x * y * z == pytest.approx(7**3, rel=0.2)
    assert moments(trainer)["exp_avg"].shape == trainer.field.grid.features.shape
    assert 0 < trainer.occupancy.fraction() < 1


def test_occupancy_is_updated_from_its_start_in_its_rhythm(make_trainer):
    trainer = make_trainer("trainer.occupancy.start=4", "trainer.occupancy.every=3")
    updates = []
    update = trainer.occupancy.update_from_vertices

    def spy(*args):
        updates.append(trainer.step)
        update(*args)

    trainer.occupancy.update_from_vertices = spy
    trainer.fit()
    assert updates == [4, 7]
    fractions = [value for _, value in trainer.log.series("train/occupancy")]
    assert len(set(fractions[:4])) == 1
    assert fractions[4] < fractions[3], "an even, nearly empty field falls below the threshold in places"


def test_what_every_image_shows_as_transparent_is_never_occupied(make_trainer, fixture_aabb):
    split = load_blender(FIXTURE, aabb=fixture_aabb).train
    options = ("trainer.occupancy.resolution=24", "trainer.steps=3", "trainer.occupancy.start=2")
    trainer = make_trainer(*options, split=split)
    trainer.fit()
    possible = trainer.occupancy.possible
    assert 0 < possible.float().mean() < 0.9
    assert not (trainer.occupancy.occupied & ~possible).any()
    fractions = [value for _, value in trainer.log.series("train/occupancy")]
    assert fractions[:2] == pytest.approx([float(possible.float().mean())] * 2)


# ---------------------------------------------------------------------------------- stopping and going on again


STAGES = "trainer.stages=[{step: 0, resolution: 8}, {step: 3, resolution: 12, crop: true}, {step: 6, resolution: 14}]"
SCHEDULE = (STAGES, "trainer.occupancy.start=2", "trainer.preview_every=1")


def interrupt_at(step: int):
    def preview(now: int) -> None:
        if now == step:
            os.kill(os.getpid(), signal.SIGINT)

    return preview


@MODELS
@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("listed", [False, True], ids=["whole", "listed"])
def test_resuming_changes_nothing(make_trainer, monkeypatch, stop, model, listed):
    """Bit for bit; step 3 is where a stage starts, so it must be entered after the restart and only once."""
    if listed:  # as grids of practical size are
        monkeypatch.setattr(optimizer, "_WORTH_LISTING", 1)
    options = (*SCHEDULE, *model, *(VARIATION if model == MLP else ()))
    whole = make_trainer(*options, folder="whole")
    assert whole.fit()

    first = make_trainer(*options, folder="parts")
    assert not first.fit(interrupt_at(stop))
    assert first.step == stop
    torch.rand(1000)  # whatever happened to the generator in between must not matter
    second = make_trainer(*options, folder="parts", seed=99)
    second.restore(load_checkpoint(first.run_directory))
    assert second.step == stop
    assert second.field.grid.resolution == first.field.grid.resolution
    torch.testing.assert_close(second.field.grid.aabb, first.field.grid.aabb, atol=0, rtol=0)
    assert second.fit()

    expected, actual = load_checkpoint(whole.run_directory), load_checkpoint(second.run_directory)
    assert expected["step"] == actual["step"] == 10
    assert differences(expected, actual) == ["state.train_seconds", "state.config.note"]
    assert set(actual["optimizer"]) == {"grid", "network"}
    split_losses = first.log.series("loss/photometric") + second.log.series("loss/photometric")
    assert split_losses == whole.log.series("loss/photometric")


def test_differences_are_seen(make_trainer):
    """Guards the test above: another seed must show."""
    runs = []
    for seed in (0, 1):
        trainer = make_trainer("trainer.steps=2", folder=str(seed), seed=seed)
        trainer.fit()
        runs.append(load_checkpoint(trainer.run_directory))
    found = differences(*runs)
    assert "state.field.grid.features" in found
    assert "state.rng" in found


UNTOUCHED = (
    "trainer.stages=[{step: 0, resolution: 8, crop: true}, {step: 40, resolution: 24}]",
    "trainer.average_steps=4",
    "trainer.steps=20",
    "trainer.preview_every=1",
)


@pytest.mark.parametrize("model", [PYRAMID[0], SUM[0]])
def test_what_training_has_not_touched_takes_no_room_and_comes_back(make_trainer, monkeypatch, device, model):
    monkeypatch.setattr(sparse, "_MIN_ELEMENTS", 64)
    trainer = make_trainer(model, "model.resolutions=[4,8,24]", *UNTOUCHED, device=device)
    assert not trainer.fit(interrupt_at(15))
    names = {f"grid._grids.{level}.features": values for level, values in enumerate(trainer.field.grid.levels)}
    path = trainer.run_directory / "checkpoint_0000015.pt"
    stored, loaded = torch.load(path, weights_only=True), load_checkpoint(path)
    finest = "grid._grids.2.features"
    for part in (stored["field"], stored["average"]["mean"]):
        assert part[finest]["chunks"].numel() == 0, "the crop at step 0 has brought new noise, which the seed tells"
    for part in (loaded["field"], loaded["average"]["mean"]):
        assert part[finest].abs().max() > 0
        assert torch.equal(part[finest], names[finest].detach().cpu())
    for name, values in trainer.field.state_dict(keep_vars=True).items():
        if isinstance(values, Tensor):
            assert torch.equal(loaded["field"][name].view(torch.int32), values.detach().cpu().view(torch.int32)), name


def test_resuming_from_what_was_left_out_changes_nothing(make_trainer, monkeypatch):
    monkeypatch.setattr(sparse, "_MIN_ELEMENTS", 64)
    options = (*PYRAMID, "model.resolutions=[4,8,24]", *UNTOUCHED)
    whole = make_trainer(*options, folder="whole")
    assert whole.fit()
    first = make_trainer(*options, folder="parts")
    assert not first.fit(interrupt_at(15))
    second = make_trainer(*options, folder="parts", seed=99)
    second.restore(load_checkpoint(first.run_directory))
    assert second.fit()
    expected, actual = load_checkpoint(whole.run_directory), load_checkpoint(second.run_directory)
    assert differences(expected, actual) == ["state.train_seconds", "state.config.note"]


def test_resuming_on_a_device_continues_the_count(make_trainer, device):
    first = make_trainer(*SCHEDULE, device=device)
    assert not first.fit(interrupt_at(5))
    second = make_trainer(*SCHEDULE, device=device)
    second.restore(load_checkpoint(first.run_directory, device))
    torch.testing.assert_close(second.field.grid.features, first.field.grid.features, atol=0, rtol=0)
    assert moments(second)["exp_avg"].device.type == device.type
    assert float(moments(second)["step"]) == 5
    assert second.train_seconds == first.train_seconds > 0
    assert second.fit()
    assert [step for step, _ in second.log.series("train/psnr")] == [6, 7, 8, 9, 10]
    assert second.train_seconds > first.train_seconds


def test_resuming_takes_rates_and_limits_from_the_configuration(make_trainer):
    first = make_trainer("optimizer.grid_lr=0.5", "trainer.preview_every=1")
    first.fit(interrupt_at(5))
    second = make_trainer("optimizer.grid_lr=0.25", "trainer.rates.final_factor=1", "trainer.max_rays=20")
    second.restore(load_checkpoint(first.run_directory))
    assert second.fit()
    assert second.log.series("lr/grid") == [(step, 0.25) for step in range(6, 11)]
    assert {value for _, value in second.log.series("train/rays_per_step")} == {20}


def test_an_interrupted_run_leaves_a_checkpoint(make_trainer):
    trainer = make_trainer(*SCHEDULE)
    handler = signal.getsignal(signal.SIGINT)
    assert trainer.fit(interrupt_at(4)) is False
    assert signal.getsignal(signal.SIGINT) is handler
    assert [file.name for file in trainer.run_directory.iterdir()] == ["checkpoint_0000004.pt"]
    state = load_checkpoint(trainer.run_directory)
    assert state["step"] == 4
    assert state["config"] == {"note": "run"}
    assert torch.equal(state["field"]["grid.features"], trainer.field.grid.features)
    assert torch.equal(state["occupancy"]["occupied"], trainer.occupancy.occupied)


def test_the_field_ends_as_the_mean_of_its_last_steps(make_trainer):
    plain = make_trainer("trainer.steps=20")
    plain.fit()
    averaged = make_trainer("trainer.steps=20", "trainer.average_steps=30")
    half_way = {}

    def keep(step, values):
        if step in (10, 20):
            half_way[step] = averaged.field.grid.features.detach().clone()

    averaged.log.watch = keep
    averaged.fit()
    torch.testing.assert_close(half_way[20], plain.field.grid.features.detach())
    expected = torch.lerp(half_way[10], half_way[20], 1 - math.exp(-10 / 30))
    torch.testing.assert_close(averaged.field.grid.features.detach(), expected)


def test_an_average_survives_an_interruption(make_trainer):
    settings = ("trainer.steps=30", "trainer.average_steps=20", "trainer.preview_every=1")
    whole = make_trainer(*settings)
    whole.fit()
    first = make_trainer(*settings)
    first.fit(interrupt_at(15))
    second = make_trainer(*settings)
    second.restore(load_checkpoint(first.run_directory))
    second.fit()
    torch.testing.assert_close(second.field.grid.features, whole.field.grid.features, atol=0, rtol=0)


@pytest.mark.parametrize("keep", [True, False])
def test_checkpoints_and_previews_come_in_their_rhythm(make_trainer, keep):
    trainer = make_trainer("trainer.checkpoint_every=4", f"trainer.keep_checkpoints={keep}", "trainer.preview_every=3")
    previews = []
    assert trainer.fit(previews.append) is True
    assert previews == [3, 6, 9]
    names = sorted(file.name for file in trainer.run_directory.iterdir())
    assert names == [f"checkpoint_{step:07d}.pt" for step in ((4, 8, 10) if keep else (10,))]
    assert load_checkpoint(trainer.run_directory / names[0])["step"] == (4 if keep else 10)


def test_a_damaged_checkpoint_replaces_none(make_trainer, monkeypatch, caplog):
    trainer = make_trainer("trainer.checkpoint_every=4")
    save = trainer_module.save_checkpoint
    present = {}

    def save_badly(path: Path, state: dict[str, Any], noise: dict[str, UniformNoise]) -> None:
        present[state["step"]] = sorted(file.name for file in path.parent.glob("*.pt"))
        save(path, state, noise)
        if state["step"] == 8:
            path.write_bytes(path.read_bytes()[:-100])

    monkeypatch.setattr(trainer_module, "save_checkpoint", save_badly)
    assert trainer.fit()
    assert "checkpoint_0000008.pt is truncated or damaged" in caplog.text
    assert present[10] == ["checkpoint_0000004.pt", "checkpoint_0000008.pt"]
    assert [file.name for file in trainer.run_directory.iterdir()] == ["checkpoint_0000010.pt"], "the next one is sound"


def test_a_finished_run_is_not_trained_further(make_trainer):
    trainer = make_trainer("trainer.steps=2")
    trainer.fit()
    again = make_trainer("trainer.steps=2")
    again.restore(load_checkpoint(trainer.run_directory))
    assert again.fit()
    assert again.log.records == []
    assert torch.equal(again.field.grid.features, trainer.field.grid.features)


def test_previews_and_checkpoints_are_not_charged_to_training(make_trainer):
    trainer = make_trainer("trainer.steps=3", "trainer.preview_every=1")
    now = {"seconds": 0.0}

    def clock() -> float:
        now["seconds"] += 1.0
        return now["seconds"]

    def preview(step: int) -> None:
        now["seconds"] += 1000.0

    trainer._now = clock
    trainer.fit(preview)
    assert 0 < trainer.train_seconds < 100


# ---------------------------------------------------------------------------------------------------- complaints


def test_an_empty_field_is_an_error(make_trainer, device):
    trainer = make_trainer("trainer.occupancy.start=1", device=device)
    with torch.no_grad():
        trainer.field.grid.features[..., 0] = -30.0
    with pytest.raises(EmptyFieldError, match=r"step 2: the field has become empty .*trainer\.occupancy\.threshold"):
        trainer.fit()


@pytest.mark.parametrize("model", [MLP, PYRAMID], ids=["mlp", "pyramid"])
def test_an_empty_field_cannot_be_cropped(make_trainer, model):
    stages = "trainer.stages=[{step: 0, resolution: 12}, {step: 4, resolution: 12, crop: true}]"
    trainer = make_trainer(*model, stages, "trainer.occupancy.start=1", "trainer.log_every=9")
    trainer.field.density = lambda points: torch.zeros(len(points))
    trainer.field.decoder.density = lambda features: torch.zeros(features.shape[:-1])
    with pytest.raises(EmptyFieldError, match=r"step 4: the field has become empty"):
        trainer.fit()


def test_a_loss_that_is_not_finite_is_an_error(make_trainer, device):
    trainer = make_trainer("trainer.log_every=1", device=device)
    with torch.no_grad():
        trainer.field.decoder.network[-1].bias.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"step 1.*loss.*not finite.*loss/photometric.*nan"):
        trainer.fit()
    assert not trainer.run_directory.exists(), "no checkpoint of a broken field"


def test_a_loss_that_was_not_finite_between_two_records_is_an_error(make_trainer):
    trainer = make_trainer("trainer.log_every=5")
    with torch.no_grad():
        trainer.field.decoder.network[-1].bias.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.fit()


def test_a_network_that_is_not_finite_is_an_error_though_nothing_shows_then(make_trainer, device):
    trainer = make_trainer(*PYRAMID, "trainer.log_every=5", device=device)
    with torch.no_grad():
        trainer.field.decoder.density_network[0].fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"step 5: the loss or the field was not finite"):
        trainer.fit()


def test_levels_beyond_the_last_stage_are_left_out_and_named(make_trainer, caplog):
    options = ("model=pyramid", "model.resolutions=[4,8,12,16]", "trainer.stages=[{step: 0, resolution: 9}]")
    trainer = make_trainer(*options)
    assert trainer.field.grid.resolutions == (4, 8)
    assert "levels [12, 16] of model.resolutions" in caplog.text


def test_falling_resolutions_lift_the_tiles_of_a_grid_too_small_for_them(make_trainer, monkeypatch):
    monkeypatch.setattr("voxelfield.training.optimizer._WORTH_LISTING", 1000)
    stages = "trainer.stages=[{step: 0, resolution: 12}, {step: 3, resolution: 8, crop: true}]"
    assert make_trainer("model=mlp", stages, "trainer.steps=5").fit()


def test_signals_find_their_handlers_after_an_error(make_trainer):
    handler = signal.getsignal(signal.SIGINT)
    trainer = make_trainer("trainer.occupancy.start=0")
    with torch.no_grad():
        trainer.field.grid.features[..., 0] = -30.0
    with pytest.raises(RuntimeError, match="empty"):
        trainer.fit()
    assert signal.getsignal(signal.SIGINT) is handler


# --------------------------------------------------------------------------------------------------------- views


def test_a_view_is_rendered_over_the_evaluation_background(make_trainer, scene, device):
    for kind, value in (("white", 1.0), ("black", 0.0)):
        trainer = make_trainer(f"trainer.evaluation_background={kind}", device=device)
        with torch.no_grad():
            trainer.field.grid.features[..., 0] = -30.0
        view = trainer.renderer().view(scene.test.cameras, 1)
        assert view.rgb.shape == (25, 25, 3)
        assert not view.rgb.requires_grad
        torch.testing.assert_close(view.rgb, torch.full_like(view.rgb, value), atol=1e-3, rtol=0)


def test_a_view_does_not_depend_on_the_chunk(make_trainer, scene):
    trainer = make_trainer()
    trainer.fit()
    views = []
    for chunk in (7, 10**6):
        trainer.config.chunk = chunk
        views.append(trainer.renderer().view(scene.test.cameras, 0).rgb)
    torch.testing.assert_close(views[0], views[1], atol=1e-5, rtol=0)
    assert views[0].std() > 0.01


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(
    ("model", "backend"),
    [(MLP, "render_view"), (SUM, "render_grid_image"), (PYRAMID, "render_pyramid_image")],
    ids=["mlp", "sh", "pyramid"],
)
def test_views_are_those_of_the_field_as_training_reads_it(make_trainer, scene, device, precision, model, backend):
    # In the middle of a schedule too, where a pyramid's finest level is off.
    stages = "trainer.stages=[{step: 0, resolution: 8}, {step: 12, resolution: 12}]"
    trainer = make_trainer(*model, stages, f"trainer.precision={precision}", "trainer.steps=10", device=device)
    trainer.fit()
    renderer = trainer.renderer()
    assert renderer.backend == backend
    view = renderer.view(scene.test.cameras, 1)
    with trainer._step.autocast():
        cameras = scene.test.cameras.to(device)
        settings = (trainer.occupancy, trainer.settings, trainer.background, 10**6)
        expected = render_view(trainer.field, cameras, 1, *settings)
    assert expected.rgb.std() > 0.01
    off = (view.rgb - expected.rgb).abs()
    assert off.mean() < 1e-3
    assert (off.amax(-1) > 1e-2).double().mean() < 0.02


def test_supersampling_is_as_configured(make_trainer, scene, device):
    trainer = make_trainer(*SUM, device=device)
    trainer.fit()
    views = []
    for trainer.config.evaluation.supersampling in (1, 2):
        views.append(trainer.renderer().view(scene.test.cameras, 0).rgb)
    assert views[0].shape == views[1].shape
    assert 1e-4 < (views[0] - views[1]).abs().mean() < 0.1
    trainer.config.transfer = "linear"
    linear = trainer.renderer().view(scene.test.cameras, 0).rgb
    # Light is more than its encoding says of a mean.
    assert 0 < (views[1] - linear).mean() < 0.05


def test_a_field_that_is_not_finite_replaces_no_checkpoint(make_trainer):
    trainer = make_trainer()
    sound = trainer.save()
    trainer.step = 1
    with torch.no_grad():
        trainer.field.grid.features[0, 0, 0, 0] = math.nan
    broken = trainer.save()
    assert sound.is_file()
    assert broken.is_file()


def test_a_checkpoint_that_cannot_be_removed_does_not_end_training(make_trainer, monkeypatch, caplog):
    trainer = make_trainer("trainer.checkpoint_every=4")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("held by another process")

    monkeypatch.setattr(trainer_module, "replace_checkpoints", refuse)
    assert trainer.fit()
    assert "held by another process; earlier checkpoints stay" in caplog.text


class PlainDecoder(nn.Module):
    """A user's own: the least that a field takes."""

    channels = 4

    def density(self, features: Tensor) -> Tensor:
        return 20 * F.softplus(features[..., 0].float() - 4)

    def forward(self, features: Tensor, directions: Tensor, ray_index: Tensor) -> tuple[Tensor, Tensor]:
        return self.density(features), torch.sigmoid(features[:, 1:].float())


def test_a_decoder_of_a_users_own_trains(make_trainer, scene, tmp_path, device):
    like = make_trainer("trainer.steps=60", "trainer.occupancy.start=20", "model=mlp")
    field = RadianceField(VoxelGrid(12, 4, scene.aabb), PlainDecoder()).to(device)
    log = Recorder()
    optimizer_config = OptimizerConfig(grid_lr=0.2, network_lr=1e-3, grid_decay=0.0, skip_untouched=False)
    trainer = Trainer(field, like.recipe, scene.train, like.config, optimizer_config, log, tmp_path / "own", {})
    assert trainer.fit()
    losses = [loss for _, loss in log.series("loss/photometric")]
    assert fmean(losses[-5:]) < 0.5 * fmean(losses[:5])
    assert trainer.renderer().view(scene.test.cameras, 0).rgb.isfinite().all()
