"""The training loop on tiny grids and a scene of 25x25 pixels: it learns, grows, stops, resumes and complains."""

from __future__ import annotations

import logging
import math
import signal
import threading
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from quick_presets import preset
from small_sessions import LEGO, Recorder, differences, fitted, interrupt_at, restored
from torch import Tensor
from torch.nn import functional as F

import voxelfield
from voxelfield.components.hidden_cells import HiddenCells
from voxelfield.components.tensorboard import TensorBoardLogger
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene, Split
from voxelfield.models.training import EmptyFieldError
from voxelfield.rendering.render import render_view
from voxelfield.run_directory import VIDEO, read_metrics
from voxelfield.settings import OptimizerConfig, TrainerConfig
from voxelfield.trained.checkpoint_file import load_checkpoint, resolve_checkpoint
from voxelfield.training import checkpoints as checkpoint_module
from voxelfield.training import execution
from voxelfield.training.session import Hook, Session
from voxelfield.warps.nested_boxes import NestedBoxes
from voxelfield.warps.warp import Warp

pytestmark = pytest.mark.usefixtures("one_thread")

# The base settings of every session here; tests override individual ones.
TINY = (
    "trainer=smoke",
    "trainer.steps=10",
    "trainer.visible_samples=4096",
    "trainer.log_every=1",
    "trainer.preview_every=0",
    "trainer.checkpoint_every=0",
    "trainer.stages=[{step: 0, resolution: 12}]",
    "trainer.render.voxels_per_step=0.5",
    "trainer.occupancy.resolution=12",
    "trainer.occupancy.start=1000",
    "trainer.occupancy.every=2",
)
# On CUDA its networks run in 16 bits whatever the precision: their gradients must not underflow.
PYRAMID = ("model=pyramid", "model.resolutions=[4,8,12]", "model.width=16", "trainer.loss_scale=4096")
SUM = ("model=sh", "model.resolutions=[3,6,12]", "model.view_resolution=6")
MLP = ("model=dense",)
# Total variation in every step; of a single grid.
VARIATION = ("trainer.loss.tv_features=1e-4", "trainer.loss.tv_every=1", "trainer.loss.tv_until=8")
MODELS = pytest.mark.parametrize("model", [MLP, SUM, PYRAMID], ids=["dense", "sh", "pyramid"])
TWO_MODELS = pytest.mark.parametrize("model", [MLP, PYRAMID], ids=["dense", "pyramid"])


def variation_of(model: tuple[str, ...]) -> tuple[str, ...]:
    """The settings with which a model's grids are kept smooth."""
    return {MLP: VARIATION, PYRAMID: VARIATION}.get(model, ())


@pytest.fixture
def make_session(scene, tmp_path):
    def make(
        *overrides: str,
        device: torch.device | str = "cpu",
        folder: str = "run",
        seed: int = 0,
        split: Split = scene.train,
        warp: Warp | None = None,
        **hooks: Hook,
    ) -> Session:
        settings = preset("model=dense", "trainer=cpu", *TINY, *overrides, f"device={device}", f"seed={seed}")
        split_scene = Scene("lego", scene.aabb, {"train": split})
        return Session(split_scene, settings, output=tmp_path / folder, logger=Recorder(), warp=warp, **hooks)

    return make


def empty(session: Session) -> None:
    """Makes the field transparent everywhere."""
    with torch.no_grad():
        session.field.grid.features[..., 0] = -30.0


def moments(session: Session) -> dict[str, Any]:
    return session.optimizers.grid.state[session.field.grid.features]


# --------------------------------------------------------------------------------------------------- learning


def test_different_times_of_a_static_field_are_named_once(make_session, scene, caplog):
    count = len(scene.train)
    for times, warned in ((torch.arange(count) / count, 1), (torch.ones(count), 0)):
        caplog.clear()
        make_session(split=replace(scene.train, extras={"time": times}))
        named = [record for record in caplog.records if "have different times" in record.getMessage()]
        assert len(named) == warned


@MODELS
def test_the_error_falls(make_session, device, model):
    session = fitted(make_session(*model, "trainer.steps=80", "trainer.occupancy.start=30", device=device))
    losses = session.log.values("loss/photometric")
    assert len(losses) == 80
    assert fmean(losses[-10:]) < 0.5 * fmean(losses[:10])
    assert session.train_seconds > 0
    psnr = session.log.values("train/psnr")
    assert psnr == pytest.approx((-10 * torch.tensor(losses).log10()).tolist(), rel=1e-4)


@MODELS
def test_pixels_that_are_means_of_rays_are_learned(make_session, device, model):
    options = ("trainer.supersampling=2", "trainer.max_rays=255", "trainer.steps=80", "trainer.occupancy.start=30")
    options += ("trainer.rates.network=3",)
    # On CUDA as many rays as configured are drawn in every step, and with room for all samples each of them counts.
    room = ("trainer.visible_samples=65536",) if device.type == "cuda" else ()
    session = fitted(make_session(*model, *options, *room, device=device))
    losses = session.log.values("loss/photometric")
    assert fmean(losses[-10:]) < 0.5 * fmean(losses[:10])
    rays = set(session.log.values("train/rays_per_step"))
    assert all(number % 4 == 0 and number <= 252 for number in rays)
    assert rays == {252} if device.type == "cuda" else len(rays) > 1


def test_batches_grow(make_session, device):
    settings = (
        "trainer.small_batches=0.75",
        "trainer.steps=24",
        "trainer.max_rays=400",
        "trainer.visible_samples=65536",
    )
    session = fitted(make_session(*PYRAMID, *settings, device=device))
    rays = session.log.values("train/rays_per_step")
    if device.type == "cuda":
        assert rays == [100] * 6 + [200] * 12 + [400] * 6
    else:
        # The CPU changes the number by at most a quarter from one step to the next.
        assert max(rays[:6]) <= 100 < max(rays[6:18]) <= 200 < max(rays[18:]) <= 400
    # One that is interrupted among small batches goes on as if it had not been, up to the order of a GPU's sums.
    stopped = make_session(*PYRAMID, *settings, device=device, folder="stopped")
    while stopped.step < 8:
        stopped.train_step()
    stopped.save()
    resumed = make_session(*PYRAMID, *settings, f"resume={stopped.checkpoint}", device=device, folder="resumed")
    fitted(resumed)
    assert resumed.log.values("train/rays_per_step")[-16:] == rays[8:]
    for one, other in zip(session.field.parameters(), resumed.field.parameters(), strict=True):
        assert device.type == "cuda" or torch.equal(one, other)


@pytest.mark.parametrize(("side", "differs"), [(1, False), (2, True)])
def test_rays_of_a_pixel_are_averaged_as_configured(make_session, side, differs):
    losses = []
    for pixel_averaging in ("linear_light", "encoded"):
        options = ("trainer.steps=1", f"trainer.supersampling={side}", f"trainer.pixel_averaging={pixel_averaging}")
        session = fitted(make_session(*PYRAMID, *options))
        losses += session.log.values("loss/photometric")
    assert losses[0] == pytest.approx(losses[1], rel=0.1)
    assert (losses[0] != losses[1]) == differs


@MODELS
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_learns_and_leaves_parameters_in_float32(make_session, device, precision, model):
    options = ("trainer.steps=4", "trainer.visible_samples=1024", f"trainer.precision={precision}")
    session = make_session(*model, *options, "trainer.loss_scale=1024", device=device)
    before = [parameter.detach().clone() for parameter in session.field.parameters()]
    assert session.fit()
    for parameter, old in zip(session.field.parameters(), before, strict=True):
        assert parameter.dtype == torch.float32
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, old)


@MODELS
def test_the_scale_of_the_loss_does_not_matter(make_session, model):
    fields = []
    for scale in (1, 4096):
        # Adam's floor is the one thing that does not scale along.
        options = (f"trainer.loss_scale={scale}", f"optimizer.eps={1e-10 * scale}")
        session = fitted(make_session(*model, *variation_of(model), *options))
        fields.append(session.field)
    torch.testing.assert_close(*([*field.parameters()] for field in fields))


@pytest.mark.parametrize(
    ("background", "expected"),
    [
        # with 8-bit opacity a and colours c, an empty field is off by a * (c - background)
        ("white", lambda c: (c - 1) ** 2),
        ("black", lambda c: c**2),
        ("random", lambda c: c**2 - c + 1 / 3),  # the mean over backgrounds in [0, 1]
    ],
)
def test_rendering_and_truth_share_their_background(make_session, scene, background, expected):
    pixel = torch.tensor([204, 102, 0, 128], dtype=torch.uint8)
    images = pixel.expand_as(scene.train.images).contiguous()
    session = make_session(
        f"trainer.background={background}",
        "trainer.steps=1",
        "trainer.visible_samples=1000000",
        split=Split(images, scene.train.cameras, scene.train.names),
    )
    empty(session)
    session.fit()
    ((_, loss),) = session.log.series("loss/photometric")
    mean = fmean(expected(c) for c in (0.8, 0.4, 0.0))
    # over 4096 rays the average of random backgrounds is within a few percent
    assert loss == pytest.approx((128 / 255) ** 2 * mean, rel=0.1 if background == "random" else 1e-3)


def test_learning_rates_decay_to_the_configured_share(make_session):
    session = make_session("trainer.rates.final_factor=0.01", "optimizer.grid_lr=0.5", "optimizer.network_lr=0.25")
    session.fit()
    grid, network = session.log.series("lr/grid"), session.log.series("lr/network")
    # the record of step k is that of the k-th update, which starts from step k - 1
    # rates are float32 on the device
    assert grid == [(k, pytest.approx(0.5 * 0.01 ** ((k - 1) / 10), rel=1e-5)) for k in range(1, 11)]
    assert network == [(k, pytest.approx(0.25 * 0.01 ** ((k - 1) / 10), rel=1e-5)) for k in range(1, 11)]


def test_every_weighted_term_is_logged_and_the_rest_is_not(make_session):
    weights = ("structure=1e-3", "sample_rgb=0.1", "opacity_entropy=0.1", "sparsity=0.1")
    session = fitted(make_session(*(f"trainer.loss.{weight}" for weight in weights)))
    rendered = {"loss/photometric", "loss/structure", "loss/sample_rgb", "loss/opacity_entropy", "loss/sparsity"}
    logged = {
        step: {tag for tag in values if tag.startswith("loss/")}
        for step, values in session.log.records
        if "train/psnr" in values
    }
    assert logged == dict.fromkeys(range(1, 11), rendered)


def test_total_variation_keeps_the_features_of_a_pyramid_smooth(make_session, device):
    def roughness(*options: str) -> float:
        session = fitted(make_session(*PYRAMID, *options, "trainer.loss.tv_every=1", "trainer.loss.tv_until=100"))
        levels = [level.detach() for level in session.field.grid.levels]
        return sum(float(level.diff(dim=axis).square().sum()) for level in levels for axis in range(3))

    assert roughness("trainer.loss.tv_features=1e-2") < 0.5 * roughness()


def test_a_record_is_the_mean_since_the_last_one(make_session):
    single = fitted(make_session())
    every_four = fitted(make_session("trainer.log_every=4"))
    for tag in ("loss/photometric", "loss/sample_rgb", "train/rays_per_step"):
        values = single.log.values(tag)
        expected = [(4, fmean(values[:4])), (8, fmean(values[4:8])), (10, fmean(values[8:]))]
        assert every_four.log.series(tag) == [(step, pytest.approx(mean)) for step, mean in expected]


def test_rays_are_adapted_to_the_number_of_samples(make_session):
    session = fitted(make_session("trainer.steps=40"))
    rays = dict(session.log.series("train/rays_per_step"))
    per_ray = dict(session.log.series("train/samples_per_ray"))
    assert rays[1] == 4096 // 64
    assert rays[40] * per_ray[40] == pytest.approx(4096, rel=0.3)
    capped = fitted(make_session("trainer.max_rays=100"))
    assert max(capped.log.values("train/rays_per_step")) <= 100


# ------------------------------------------------------------------------------------------ graphs of CUDA steps

ON_CUDA = (*PYRAMID, "trainer.precision=float16", "trainer.max_rays=1024")


def fit_on_cuda(make_session, *overrides, watch=None):
    session = make_session(*ON_CUDA, "trainer.visible_samples=65536", *overrides, device="cuda")
    session.log.watch = watch
    session.fit()
    return session


@pytest.mark.cuda
def test_a_graphed_run_learns_as_one_without(make_session, monkeypatch):
    stages = "trainer.stages=[{step: 0, resolution: 8}, {step: 15, resolution: 12, crop: true}]"
    options = ("trainer.steps=80", "trainer.occupancy.start=10", "trainer.occupancy.every=10", stages)
    runs = []
    for warm_up in (3, 10**9):
        monkeypatch.setattr(execution, "_WARM_UP", warm_up)
        session = fit_on_cuda(make_session, *options)
        runs.append(session.log.values("loss/photometric"))
        assert len(runs[-1]) == 80
        assert fmean(runs[-1][-10:]) < 0.5 * fmean(runs[-1][:10])
    # The same pixels are drawn, but gradients are summed in any order.
    for first in range(0, 80, 10):
        graphed, single = (fmean(losses[first : first + 10]) for losses in runs)
        assert graphed == pytest.approx(single, rel=0.15), f"steps {first} to {first + 9}"


@pytest.mark.cuda
def test_a_graph_follows_occupancy(make_session):
    def watch(step, values):
        if step == 8:
            session.occupancy.restrict(corner, session.occupancy.aabb)

    corner = torch.zeros(12, 12, 12, dtype=torch.bool, device="cuda")
    corner[5:7, 5:7, 5:7] = True
    session = make_session(*ON_CUDA, "trainer.visible_samples=65536", "trainer.steps=12", device="cuda")
    session.log.watch = watch
    session.fit()
    samples = session.log.values("train/samples_per_ray")
    assert min(samples[:8]) > 0
    assert 0 < max(samples[8:]) < 0.3 * min(samples[:8])


@pytest.mark.cuda
def test_a_graph_follows_the_learning_rate(make_session):
    changes, last = {}, {}

    def watch(step, values):
        features = session.field.grid.levels[0].detach().clone()
        if last:
            changes[step] = float((features - last["features"]).abs().max())
        last["features"] = features

    session = make_session(*ON_CUDA, "trainer.steps=20", "trainer.rates.final_factor=1e-8", device="cuda")
    session.log.watch = watch
    session.fit()
    assert changes[6] > 0
    assert changes[20] < 1e-3 * changes[6]


@pytest.mark.cuda
def test_rays_that_do_not_fit_are_not_counted(make_session):
    roomy = fit_on_cuda(make_session, "trainer.visible_samples=262144", "trainer.steps=6")
    assert set(roomy.log.values("train/rays_per_step")) == {1024}
    narrow = fit_on_cuda(make_session, "trainer.visible_samples=512", "trainer.steps=6")
    taken, per_ray = (dict(narrow.log.series(f"train/{tag}")) for tag in ("rays_per_step", "samples_per_ray"))
    for step in range(1, 7):
        assert 0 < taken[step] < 1024
        assert taken[step] * per_ray[step] <= 512


@pytest.mark.cuda
def test_a_resumed_run_on_cuda_draws_as_many_rays_as_configured(make_session):
    first = fitted(make_session(*PYRAMID, "trainer.steps=2"))
    second = make_session(*ON_CUDA, "trainer.steps=8", "trainer.visible_samples=262144", device="cuda")
    second.restore(load_checkpoint(first.output))
    assert second.fit()
    assert set(second.log.values("train/rays_per_step")) == {1024}


# ------------------------------------------------------------------------------------------------------ stages


def test_a_stage_refines_the_grid_and_the_optimizer_follows(make_session, device):
    stages = "trainer.stages=[{step: 0, resolution: 8}, {step: 3, resolution: 12}]"
    session = make_session(stages, "trainer.steps=4", device=device)
    parameter, seen = session.field.grid.features, {}

    def watch(step, values):
        # records of a stage come right after its change, those of a step right after the step
        state = {key: value.clone() for key, value in moments(session).items()} if moments(session) else {}
        seen[step, "stage/resolution" in values] = (parameter.detach().clone(), state)

    session.log.watch = watch
    assert session.fit()
    assert session.log.series("stage/resolution") == [(0, 8), (3, 12)]
    assert session.log.series("stage/vertices") == [(0, 8**3), (3, 12**3)]
    assert session.field.grid.features is parameter
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
    assert float(moments(session)["step"]) == 4
    assert session.model.settings.step == pytest.approx(0.5 * 3 / 11), "the step between samples follows the voxels"


def test_a_stage_switches_levels_on_and_crops_a_pyramid(make_session, device):
    stages = (
        "trainer.stages=[{step: 0, resolution: 4}, {step: 3, resolution: 8}, {step: 6, resolution: 12, crop: true}]"
    )
    session, changed = make_session(*PYRAMID, stages, "trainer.steps=8", device=device), {}
    before = [level.detach().clone() for level in session.field.grid.levels]

    def watch(step, values):
        if step in (3, 5):
            levels = session.field.grid.levels
            changed[step] = [not torch.equal(level, old) for level, old in zip(levels, before, strict=True)]
        if step == 5:
            session.occupancy.occupied[:4] = False

    session.log.watch = watch
    assert session.fit()
    assert changed == {3: [True, False, False], 5: [True, True, False]}
    assert session.field.grid.active == 3
    assert session.log.series("stage/resolution") == [(0, 4), (3, 8), (6, 12)]
    aabb = session.field.grid.aabb
    assert aabb[0, 0] == -0.5
    assert torch.equal(aabb, session.occupancy.aabb)
    x, y, z = session.field.grid.resolution
    assert x < y == z, "voxels stay cubes"
    assert session.model.settings.step == pytest.approx(0.5 * float(session.field.grid.voxel_size.min()))
    assert all(session.optimizers.grid.state[level]["exp_avg"].any() for level in session.field.grid.levels)


def test_a_stage_can_crop_to_what_is_occupied(make_session, device):
    # vertices 0.375 apart; occupancy cells coincide with the grid's
    session = make_session(
        "trainer.stages=[{step: 0, resolution: 9}, {step: 1, resolution: 7, crop: true}]",
        "trainer.steps=2",
        "trainer.occupancy.resolution=8",
        "trainer.occupancy.start=0",
        "optimizer.grid_lr=1e-3",
        device=device,
    )
    with torch.no_grad():
        density = session.field.grid.features[..., 0]
        density.fill_(-5.0)
        density[2:5, 2:5, 2:6] = 1.0
    assert session.fit()
    # cells that touch vertices 2 to 4 run from vertex 1 to 5, those that touch 2 to 5 from 1 to 6
    expected = torch.tensor([[-1.125, -1.125, -1.125], [0.375, 0.375, 0.75]], device=device)
    torch.testing.assert_close(session.field.grid.aabb, expected)
    torch.testing.assert_close(session.occupancy.aabb, expected)
    x, y, z = session.field.grid.resolution
    assert x == y < z, "voxels stay cubes"
    assert x * y * z == pytest.approx(7**3, rel=0.2)
    assert moments(session)["exp_avg"].shape == session.field.grid.features.shape
    assert 0 < session.occupancy.fraction() < 1


def test_occupancy_is_updated_from_its_start_in_its_rhythm(make_session):
    session = make_session("trainer.occupancy.start=4", "trainer.occupancy.every=3")
    updates = []
    update = session.occupancy.update_from_vertices

    def spy(*args, **options):
        updates.append(session.step)
        update(*args, **options)

    session.occupancy.update_from_vertices = spy
    session.fit()
    assert updates == [4, 7]
    fractions = session.log.values("train/occupancy")
    assert len(set(fractions[:4])) == 1
    assert fractions[4] < fractions[3], "an even, nearly empty field falls below the threshold in places"


def test_what_every_image_shows_as_transparent_is_never_occupied(make_session, scene):
    split = load_blender(LEGO, LoadOptions(aabb=scene.aabb)).train
    options = ("trainer.occupancy.resolution=24", "trainer.steps=3", "trainer.occupancy.start=2")
    session = fitted(make_session(*options, split=split))
    possible = session.occupancy.allowed
    assert 0 < possible.float().mean() < 0.9
    assert not (session.occupancy.occupied & ~possible).any()
    fractions = session.log.values("train/occupancy")
    assert fractions[:2] == pytest.approx([float(possible.float().mean())] * 2)


def shown_by_images(session: Session, split: Split) -> Tensor:
    """The cells in which a pixel of some image has a visible sample, drawn one image at a time."""
    occupancy, settings = session.occupancy, session.model.settings
    shown, (low, high) = torch.zeros_like(occupancy.occupied), occupancy.aabb
    cells = torch.tensor(shown.shape, device=low.device)
    cameras = split.cameras.to(session.device)
    with torch.no_grad():
        for image in range(len(cameras)):
            rays = cameras.image_rays(image, session.field.aabb)
            positions = session.model.render(rays, settings).samples.positions
            x, y, z = ((positions - low) / (high - low) * cells).long().clamp(cells * 0, cells - 1).unbind(-1)
            shown[x, y, z] = True
    return shown


@TWO_MODELS
def test_what_no_image_shows_is_emptied_and_the_images_stay_as_they_are(make_session, scene, model, device):
    options = ("trainer.steps=6", "trainer.occupancy.hidden_at=0.4", "trainer.occupancy.start=1")
    session = make_session(*model, *options, "model.density.initial=1000", "trainer.occupancy.every=9", device=device)
    hidden = session.component(HiddenCells)
    before_step, kept = hidden.before_step, []

    def spy(step: int) -> None:
        if step != 2:
            return
        expected = shown_by_images(session, scene.train)
        before = session.occupancy.occupied.clone()
        rays = scene.train.cameras[:2].to(session.device).image_rays(0, session.field.aabb)
        renderings = []
        for change in (lambda: None, lambda: before_step(step)):
            change()
            rendering = session.model.render(rays, session.model.settings)
            renderings.append(torch.cat((rendering.rgb, rendering.opacity[:, None]), dim=1))
        torch.testing.assert_close(*renderings, atol=1e-4, rtol=0)
        assert renderings[0][:, 3].max() > 0.5
        after = session.occupancy.occupied
        assert torch.equal(after, before & after)
        # These pixels are wider than cells, so neighbours of cells that are shown are kept as well.
        assert not (expected & ~after).any()
        assert 0 < after.sum() < before.sum()
        kept.append((step, session.occupancy.allowed.clone()))

    hidden.before_step = spy
    session.fit()
    [(step, allowed)] = kept
    assert step == 2
    assert torch.equal(session.occupancy.allowed, allowed)
    assert not (session.occupancy.occupied & ~allowed).any()


LEARNED = ("camera=refine", "camera.stages=[]")
NOTHING = ("model.density.initial=1e-9",)


@pytest.mark.parametrize(
    ("options", "warp", "inputs", "reason"),
    [
        ((), None, (), None),
        (("trainer.render.min_weight=0",), None, (), None),
        (LEARNED, None, (), None),
        (NOTHING, None, (), "they show no matter yet"),
        ((), NestedBoxes(((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0)), 3, near=0.2), (), "the field has a warp"),
        ((), None, ("time",), "the density depends on values of rays"),
    ],
    ids=["none", "all samples", "cameras", "nothing", "warp", "values"],
)
def test_hidden_cells_are_kept_for_a_reason(make_session, caplog, options, warp, inputs, reason):
    settings = ("model.density.initial=1000", "trainer.occupancy.hidden_at=0.5", "trainer.occupancy.start=5")
    session = make_session(*settings, *options, warp=warp)
    hidden = session.component(HiddenCells)
    before_step, allowed = hidden.before_step, []

    def spy(step: int) -> None:
        if step != 5:
            return
        session.field.density_inputs = inputs
        allowed.append(session.occupancy.allowed.clone())
        before_step(step)
        allowed.append(session.occupancy.allowed.clone())
        session.field.density_inputs = ()

    hidden.before_step = spy
    with caplog.at_level(logging.INFO):
        if options == NOTHING:
            with pytest.raises(EmptyFieldError):
                session.fit()
        else:
            session.fit()
    assert len(allowed) == 2
    if options == LEARNED:
        assert torch.equal(*allowed)
        assert "do not show" not in caplog.text
    elif reason is not None:
        assert torch.equal(*allowed)
        assert f"step 5: cells that the training images do not show are kept, because {reason}" in caplog.text
    else:
        assert allowed[1].sum() < allowed[0].sum()


# ---------------------------------------------------------------------------------- stopping and going on again


def schedule(*resolutions: int) -> tuple[str, str]:
    """Three stages, of which the second crops."""
    first, second, third = (f"resolution: {resolution}" for resolution in resolutions)
    stages = f"{{step: 0, {first}}}, {{step: 3, {second}, crop: true}}, {{step: 6, {third}}}"
    return f"trainer.stages=[{stages}]", "trainer.occupancy.start=2"


SCHEDULE = schedule(8, 12, 14)
# Grids so large that only their tiles in occupied space are updated; their steps are short, so each sample shows less.
LISTED = (*schedule(54, 56, 58), "trainer.occupancy.threshold=1e-3")
LISTED_LEVELS = {
    MLP: (),
    SUM: ("model.resolutions=[14,28,56]", "model.view_resolution=28"),
    PYRAMID: ("model.resolutions=[4,8,56]",),
}


@MODELS
@pytest.mark.parametrize("listed", [False, True], ids=["whole", "listed"])
def test_resuming_changes_nothing(make_session, model, listed):
    """Bit for bit; step 3 is where a stage starts, so it must be entered after the restart and only once."""
    options = (*model, *((*LISTED, *LISTED_LEVELS[model]) if listed else SCHEDULE))
    options += variation_of(model)
    whole = fitted(make_session(*options, folder="whole"))
    finest = whole.field.grid.levels[whole.field.grid.active - 1]
    assert (whole.optimizers.grid.active_tiles(finest) is not None) == listed
    expected = load_checkpoint(whole.output)
    assert expected["step"] == 10

    for stop in (1, 3, 5):
        folder = f"stopped after {stop}"
        first = make_session(*options, folder=folder, on_step=interrupt_at(stop))
        assert not first.fit()
        assert first.step == stop
        torch.rand(1000)  # whatever happened to the generator in between must not matter
        second = restored(make_session(*options, folder=folder, seed=99), first.output)
        assert second.step == stop
        assert second.field.grid.resolution == first.field.grid.resolution
        torch.testing.assert_close(second.field.grid.aabb, first.field.grid.aabb, atol=0, rtol=0)
        assert second.fit()

        actual = load_checkpoint(second.output)
        assert actual["step"] == 10
        assert differences(expected, actual) == ["state.train_seconds", "state.config.seed"], folder
        assert set(actual["optimizer"]) == {"grid", "network", *(["matrices"] if model == PYRAMID else [])}
        split_losses = first.log.series("loss/photometric") + second.log.series("loss/photometric")
        assert split_losses == whole.log.series("loss/photometric"), folder


UNTOUCHED = (
    "trainer.stages=[{step: 0, resolution: 8, crop: true}, {step: 40, resolution: 32}]",
    "trainer.average_steps=4",
    "trainer.steps=20",
)


def by_name_in_field(state):
    return {name.removeprefix("field."): value for name, value in state.items()}


@pytest.mark.parametrize("model", [PYRAMID[0], SUM[0]])
def test_what_training_has_not_touched_takes_no_room_and_comes_back(make_session, device, model):
    session = make_session(model, "model.resolutions=[4,8,32]", *UNTOUCHED, device=device, on_step=interrupt_at(15))
    assert not session.fit()
    names = {f"grid._grids.{level}.features": values for level, values in enumerate(session.field.grid.levels)}
    path = session.output / "checkpoint_0000015.pt"
    stored, loaded = torch.load(path, weights_only=True), load_checkpoint(path)
    finest = "grid._grids.2.features"
    for part in (by_name_in_field(stored["model"]), stored["average"]["mean"]):
        assert part[finest]["nonzero chunks"].numel() == 0, "the finest level is still off, and zero"
    for part in (by_name_in_field(loaded["model"]), loaded["average"]["mean"]):
        assert torch.equal(part[finest], names[finest].detach().cpu())
    for name, values in session.field.state_dict(keep_vars=True).items():
        if isinstance(values, Tensor):
            assert torch.equal(
                loaded["model"][f"field.{name}"].view(torch.int32), values.detach().cpu().view(torch.int32)
            ), name


def test_resuming_from_what_was_left_out_changes_nothing(make_session):
    options = (*PYRAMID, "model.resolutions=[4,8,32]", *UNTOUCHED)
    whole = fitted(make_session(*options, folder="whole"))
    first = make_session(*options, folder="parts", on_step=interrupt_at(15))
    assert not first.fit()
    second = fitted(restored(make_session(*options, folder="parts", seed=99), first.output))
    expected, actual = load_checkpoint(whole.output), load_checkpoint(second.output)
    assert differences(expected, actual) == ["state.train_seconds", "state.config.seed"]


def test_resuming_on_a_device_continues_the_count(make_session, device):
    first = make_session(*SCHEDULE, device=device, on_step=interrupt_at(5))
    assert not first.fit()
    second = make_session(*SCHEDULE, device=device)
    second.restore(load_checkpoint(first.output, device))
    torch.testing.assert_close(second.field.grid.features, first.field.grid.features, atol=0, rtol=0)
    assert moments(second)["exp_avg"].device.type == device.type
    assert float(moments(second)["step"]) == 5
    assert second.train_seconds == first.train_seconds > 0
    assert second.fit()
    assert [step for step, _ in second.log.series("train/psnr")] == [6, 7, 8, 9, 10]
    assert second.train_seconds > first.train_seconds


def test_resuming_takes_rates_and_limits_from_the_configuration(make_session):
    first = make_session("optimizer.grid_lr=0.5", on_step=interrupt_at(5))
    assert not first.fit()
    second = make_session("optimizer.grid_lr=0.25", "trainer.rates.final_factor=1", "trainer.max_rays=20")
    second.restore(load_checkpoint(first.output))
    assert second.fit()
    assert second.log.series("lr/grid") == [(step, 0.25) for step in range(6, 11)]
    assert set(second.log.values("train/rays_per_step")) == {20}


def test_an_interrupted_run_leaves_a_checkpoint(make_session):
    session = make_session(*SCHEDULE, on_step=interrupt_at(4))
    handler = signal.getsignal(signal.SIGINT)
    assert session.fit() is False
    assert signal.getsignal(signal.SIGINT) is handler
    assert [file.name for file in session.output.iterdir()] == ["checkpoint_0000004.pt"]
    state = load_checkpoint(session.output)
    assert state["step"] == 4
    assert state["config"] == asdict(session.config)
    assert torch.equal(state["model"]["field.grid.features"], session.field.grid.features)
    assert torch.equal(state["model"]["occupancy.occupied"], session.occupancy.occupied)


def test_the_field_ends_as_the_mean_of_its_last_steps(make_session):
    plain = fitted(make_session("trainer.steps=20"))
    averaged = make_session("trainer.steps=20", "trainer.average_steps=30")
    half_way = {}

    def keep(step, values):
        if step in (10, 20):
            half_way[step] = averaged.field.grid.features.detach().clone()

    averaged.log.watch = keep
    averaged.fit()
    torch.testing.assert_close(half_way[20], plain.field.grid.features.detach())
    expected = torch.lerp(half_way[10], half_way[20], 1 - math.exp(-10 / 30))
    torch.testing.assert_close(averaged.field.grid.features.detach(), expected)


@pytest.mark.parametrize("keep", [True, False])
def test_checkpoints_and_previews_come_in_their_rhythm(make_session, keep):
    previews = []
    session = make_session(
        "trainer.checkpoint_every=4",
        f"trainer.keep_checkpoints={keep}",
        "trainer.preview_every=3",
        on_preview=lambda session: previews.append(session.step),
    )
    assert session.fit() is True
    assert previews == [3, 6, 9, 10], "and after the last step"
    names = sorted(file.name for file in session.output.iterdir())
    assert names == [f"checkpoint_{step:07d}.pt" for step in ((4, 8, 10) if keep else (10,))]
    assert load_checkpoint(session.output / names[0])["step"] == (4 if keep else 10)


def test_a_damaged_checkpoint_replaces_none(make_session, monkeypatch, caplog):
    session = make_session("trainer.checkpoint_every=4")
    write = checkpoint_module.write_checkpoint
    present = {}

    def write_badly(path: Path, packed: dict[str, Any]) -> None:
        present[packed["step"]] = sorted(file.name for file in path.parent.glob("*.pt"))
        write(path, packed)
        if packed["step"] == 8:
            path.write_bytes(path.read_bytes()[:-100])

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", write_badly)
    assert session.fit()
    assert "checkpoint_0000008.pt is truncated or damaged" in caplog.text
    assert present[10] == ["checkpoint_0000004.pt", "checkpoint_0000008.pt"]
    assert [file.name for file in session.output.iterdir()] == ["checkpoint_0000010.pt"], "the next one is sound"


def test_a_finished_run_is_not_trained_further(make_session):
    session = fitted(make_session("trainer.steps=2"))
    again = fitted(restored(make_session("trainer.steps=2"), session.output))
    assert again.log.records == []
    assert torch.equal(again.field.grid.features, session.field.grid.features)


def test_previews_and_checkpoints_are_not_charged_to_training(make_session, monkeypatch):
    now = {"seconds": 0.0}

    def clock(_: torch.device) -> float:
        now["seconds"] += 1.0
        return now["seconds"]

    def preview(session: Session) -> None:
        now["seconds"] += 1000.0

    session = make_session("trainer.steps=3", "trainer.preview_every=1", on_preview=preview)
    monkeypatch.setattr("voxelfield.training.execution.synchronized_time", clock)
    session.fit()
    assert 0 < session.train_seconds < 100


# ---------------------------------------------------------------------------------------------------- complaints


def test_an_empty_field_is_an_error(make_session, device):
    session = make_session("trainer.occupancy.start=1", device=device)
    empty(session)
    with pytest.raises(EmptyFieldError, match=r"step 2: the field has become empty .*trainer\.occupancy\.threshold"):
        session.fit()


@TWO_MODELS
def test_a_field_that_is_still_a_mist_keeps_its_denser_cells(make_session, model, device):
    schedule = ("trainer.occupancy.start=0", "trainer.occupancy.every=2", "trainer.steps=7")
    session = make_session(*model, *schedule, "trainer.occupancy.threshold=0.9", device=device)
    allowed = float(session.occupancy.allowed.float().mean())
    session.fit()
    assert 0.005 * allowed < session.occupancy.fraction() < 0.9 * allowed


@TWO_MODELS
def test_an_empty_field_cannot_be_cropped(make_session, model):
    stages = "trainer.stages=[{step: 0, resolution: 12}, {step: 4, resolution: 12, crop: true}]"
    session = make_session(*model, stages, "trainer.occupancy.start=1", "trainer.log_every=9")
    session.field.density = lambda points: torch.zeros(len(points))
    session.field.decoder.density = lambda features: torch.zeros(features.shape[:-1])
    with pytest.raises(EmptyFieldError, match=r"step 4: the field has become empty"):
        session.fit()


def test_a_loss_that_is_not_finite_is_an_error(make_session, device):
    session = make_session("trainer.log_every=1", device=device)
    with torch.no_grad():
        session.field.decoder.network[-1].bias.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"step 1.*loss.*not finite.*loss/photometric.*nan"):
        session.fit()
    (state,) = session.output.iterdir()
    assert state.name == "not_finite_0000001.pt", "no checkpoint to continue from"
    assert any(value.isnan().any() for value in load_checkpoint(state)["model"].values() if value.is_floating_point())


def test_a_network_that_is_not_finite_is_an_error_though_nothing_shows_then(make_session, device):
    session = make_session(*PYRAMID, "trainer.log_every=5", device=device)
    with torch.no_grad():
        session.field.decoder.density_network[0].fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"step 5: the loss or the field was not finite"):
        session.fit()


def test_levels_beyond_the_last_stage_are_left_out_and_named(make_session, caplog):
    options = ("model=pyramid", "model.resolutions=[4,8,12,16]", "trainer.stages=[{step: 0, resolution: 9}]")
    session = make_session(*options)
    assert session.field.grid.resolutions == (4, 8)
    assert "levels [12, 16] of model.resolutions" in caplog.text


def test_falling_resolutions_lift_the_tiles_of_a_grid_too_small_for_them(make_session):
    def note(session: Session) -> None:
        listed.append(session.optimizers.grid.active_tiles(session.field.grid.features) is not None)

    listed: list[bool] = []
    stages = "trainer.stages=[{step: 0, resolution: 56}, {step: 3, resolution: 8, crop: true}]"
    assert make_session("model=dense", stages, "trainer.steps=5", on_step=note).fit()
    assert listed == [True, True, True, False, False]


# --------------------------------------------------------------------------------------------------------- views


def test_a_view_is_rendered_over_the_evaluation_background(make_session, scene, device):
    for kind, value in (("white", 1.0), ("black", 0.0)):
        session = make_session(f"trainer.evaluation_background={kind}", device=device)
        empty(session)
        view = session.renderer().view(scene.test.cameras, 1)
        assert view.rgb.shape == (25, 25, 3)
        assert not view.rgb.requires_grad
        torch.testing.assert_close(view.rgb, torch.full_like(view.rgb, value), atol=1e-3, rtol=0)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(
    ("model", "backend"),
    [(MLP, "render_view"), (SUM, "render_grid_image"), (PYRAMID, "render_pyramid_image")],
    ids=["dense", "sh", "pyramid"],
)
def test_views_are_those_of_the_field_as_training_reads_it(make_session, scene, device, precision, model, backend):
    # In the middle of a schedule too, where a pyramid's finest level is off.
    stages = "trainer.stages=[{step: 0, resolution: 8}, {step: 12, resolution: 12}]"
    session = fitted(make_session(*model, stages, f"trainer.precision={precision}", "trainer.steps=10", device=device))
    renderer = session.renderer()
    assert renderer.backend == backend
    view = renderer.view(scene.test.cameras, 1)
    with session.model.autocast():
        cameras = scene.test.cameras.to(device)
        settings = (session.occupancy, session.model.settings, session.model.background, 10**6)
        expected = render_view(session.field, cameras, 1, *settings)
    assert expected.rgb.std() > 0.01
    off = (view.rgb - expected.rgb).abs()
    assert off.mean() < 1e-3
    assert (off.amax(-1) > 1e-2).double().mean() < 0.02


def test_a_field_that_is_not_finite_replaces_no_checkpoint(make_session):
    session = make_session()
    sound = session.save()
    session._state.steps = 1
    with torch.no_grad():
        session.field.grid.features[0, 0, 0, 0] = math.nan
    broken = session.save()
    assert sound.is_file()
    assert broken.is_file()
    assert session.checkpoint == resolve_checkpoint(session.output) == sound


def test_a_checkpoint_that_cannot_be_removed_does_not_end_training(make_session, monkeypatch, caplog):
    session = make_session("trainer.checkpoint_every=4")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("held by another process")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert session.fit()
    assert "held by another process; earlier checkpoints are not removed" in caplog.text


# ----------------------------------------------------------------------------------------------- from plain Python


def test_settings_that_are_not_given_are_those_of_the_command(scene):
    session = Session(scene, "sh", trainer="smoke", device="cpu")
    like = preset("model=sh", "trainer=smoke", device="cpu")
    assert (session.config.trainer, session.config.optimizer, session.config.model) == (
        like.trainer,
        like.optimizer,
        like.model,
    )
    assert session.config.scene.name == "lego"
    torch.testing.assert_close(torch.tensor(session.config.scene.aabb), scene.aabb, atol=0, rtol=0)


def test_the_same_session_from_arguments_and_from_a_configuration(make_session, scene):
    configured = fitted(make_session())
    config = configured.config
    given = fitted(Session(scene, config.model, trainer=config.trainer, optimizer=config.optimizer, device="cpu"))
    assert torch.equal(configured.field.grid.features, given.field.grid.features)


def test_without_an_output_folder_nothing_is_written(make_session, scene, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_session("trainer.checkpoint_every=4", "trainer.preview_every=3").config
    session = fitted(Session(scene, config))
    assert session.save() is None
    assert list(tmp_path.iterdir()) == []


def test_a_session_writes_the_results_of_a_run(make_session, scene, tmp_path):
    quick = ("trainer.evaluation.video_frames=2", "trainer.evaluation.supersampling=1", "trainer.evaluation.views=2")
    config = make_session("trainer.log_every=5", *quick).config
    folder = tmp_path / "results"
    session = Session(scene, config, logger=TensorBoardLogger(folder))
    with pytest.raises(ValueError, match="folder must be given for a session without an output folder, got None"):
        voxelfield.write_results(session)
    session.fit()
    evaluated = session.evaluate(views=2)
    metrics = voxelfield.write_results(session, folder)
    assert metrics["psnr"] == evaluated.psnr
    assert metrics["seconds"]["train"] == session.train_seconds
    assert read_metrics(folder)["psnr_per_view"] == metrics["psnr_per_view"]
    assert {path.name for path in (folder / "test").iterdir()} == {f"{name}.png" for name in evaluated.names}
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert "pixels of training views" in report, "the curve that the logger has recorded"
    assert voxelfield.load(folder / "model.safetensors", "cpu").steps == 10
    assert (folder / VIDEO).is_file()
    metrics = voxelfield.write_results(session, folder)
    assert metrics["psnr"] == evaluated.psnr, "a second time, in place of the first"
    (folder / "test" / f"{evaluated.names[0]}.png").write_bytes(b"another's")
    with pytest.raises(FileExistsError, match="folder must be a folder whose images may be replaced"):
        voxelfield.write_results(session, folder)


def test_hooks_are_called_in_the_order_of_events(make_session):
    events = []
    session = make_session(
        *SCHEDULE,
        "trainer.preview_every=4",
        on_step=lambda session: events.append(("step", session.step)),
        on_stage=lambda session: events.append(("stage", session.step, session.field.grid.resolution[0])),
        on_preview=lambda session: events.append(("preview", session.step)),
    )
    session.fit()
    assert [event[1] for event in events if event[0] == "step"] == list(range(1, 11))
    assert [event[1] for event in events if event[0] == "stage"] == [0, 3, 6]
    assert [event[1] for event in events if event[0] == "preview"] == [4, 8, 10]
    assert events.index(("preview", 4)) == events.index(("step", 4)) + 1
    assert events[0][0] == "stage"


def test_previews_are_logged_where_there_are_test_views(make_session, scene):
    config = make_session("trainer.preview_every=5").config
    pictures = []
    log = Recorder()
    log.images = lambda step, tag, image: pictures.append((step, tag, tuple(image.shape)))
    Session(scene, config, logger=log).fit()
    height, width = scene.test.images.shape[1:3]
    names = [f"test/{scene.test.names[index]}" for index in (0, len(scene.test) // 2)]
    twice = 400 // max(height, width) * 2
    assert pictures == [(step, name, (twice * height, twice * width, 3)) for step in (5, 10) for name in names]
    assert [step for step, _ in log.series("test/psnr")] == [5, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "pyramids"}, "model.kind must be one of pyramid, sh, dense, got 'pyramids'"),
        ({"trainer": "quick"}, "trainer must be one of .*fast.*, got 'quick'"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, pyramid, sh, got 'sgd'"),
        ({"trainer": TrainerConfig(steps=-1)}, "trainer.steps must be at least 1, got -1"),
        ({"optimizer": OptimizerConfig(grid_lr=0)}, "optimizer.grid_lr must be positive, got 0"),
        ({"device": "gpu"}, "device must be auto, cpu, cuda or cuda:<index>, got 'gpu'"),
        ({"seed": 2**64}, "seed must be an integer of at most 64 bits"),
    ],
)
def test_a_bad_argument_is_named(scene, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        Session(scene, **arguments)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_cannot_be_written_is_an_error_once_it_is_waited_for(make_session, monkeypatch):
    def fail(path: Path, packed: dict[str, Any]) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", fail)
    session = make_session()
    assert session.fit(wait=False)
    with pytest.raises(OSError, match="disk full"):
        session.wait()
    session.wait()  # has been told


def test_a_checkpoint_is_of_the_moment_that_it_was_asked_for(make_session, monkeypatch):
    """Although it is written while training continues."""
    write, began, go_on = checkpoint_module.write_checkpoint, threading.Event(), threading.Event()

    def write_late(path: Path, packed: dict[str, Any]) -> None:
        began.set()
        assert go_on.wait(60)
        write(path, packed)

    session = make_session()
    expected = session.field.grid.features.detach().clone()
    monkeypatch.setattr(checkpoint_module, "write_checkpoint", write_late)
    path = session.save(wait=False)
    assert began.wait(60)
    with torch.no_grad():
        session.field.grid.features.add_(1)
    assert not path.exists()
    go_on.set()
    session.wait()
    assert torch.equal(load_checkpoint(path)["model"]["field.grid.features"], expected)


@pytest.mark.cuda
def test_training_cameras_on_a_gpu_are_refused(make_session, scene):
    with pytest.raises(ValueError, match=r"scene\.train\.cameras must be on the CPU, got cuda:0"):
        make_session(split=replace(scene.train, cameras=scene.train.cameras.to("cuda")))


def test_a_scene_without_views_and_a_state_that_is_no_checkpoint_are_refused(make_session, scene):
    views = scene.train
    none = Split(views.images[:0], views.cameras[:0], (), None)
    with pytest.raises(ValueError, match=r"scene\.train must have at least one view, got none"):
        make_session(split=none)
    with pytest.raises(TypeError, match="checkpoint must be one that load_checkpoint returned, got one without 'step'"):
        make_session().restore({})
