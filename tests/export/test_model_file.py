"""The model file: small, complete, and refused by name where it is not sound."""

from __future__ import annotations

import json
import math
import os
import resource
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_presets import preset
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import voxelfield
from voxelfield.export import save_model
from voxelfield.fields.field import RadianceField
from voxelfield.ops import sample_trilinear
from voxelfield.rendering.bricks import can_bake, lattice_spacing
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings, pixel_stride, ray_spacing, visible_cells, visible_samples
from voxelfield.settings import RunConfig
from voxelfield.trained.loading import load as load_model
from voxelfield.trained.model_file import (
    FORMAT,
    ModelFileError,
    feature_importance,
    reached_vertices,
    with_checksum,
)
from voxelfield.trained.trained_model import TrainedModel, restore_trained_model

BOX = ((-1.0, -1.5, -1.0), (1.0, 0.5, 2.0))
MODELS = {
    "render_pyramid_image": ("model=pyramid", "model.resolutions=[4,8,16]", "model.width=16"),
    "render_grid_image": ("model=sh", "model.resolutions=[4,16]", "model.view_resolution=4"),
    "render_view": ("model=dense",),
    "deferred shading": ("model=pyramid", "model.resolutions=[4,8,16]", "model.width=16", "model.shading=deferred"),
}


def noise(model: str, device: torch.device, cells: int = 12, radius: float = 0.6) -> TrainedModel:
    """A field of noise, of which a ball is occupied."""
    stages = "trainer.stages=[{step: 0, resolution: 16}]"
    box = f"scene.aabb={[list(corner) for corner in BOX]}"
    settings = preset(
        "scene=lego", box, "trainer=smoke", stages, f"trainer.occupancy.resolution={cells}", *MODELS[model]
    )
    field = settings.model.build(torch.tensor(BOX), settings.trainer.resolutions, "cpu")
    with torch.no_grad():
        for level in field.grid.levels:
            level.copy_(torch.randn_like(level).half())
    axes = torch.meshgrid(*[torch.linspace(-1, 1, cells)] * 3, indexing="ij")
    return trained(settings, field, torch.stack(axes).norm(dim=0) < radius, device)


def trained(settings: RunConfig, field: RadianceField, occupied: torch.Tensor, device: torch.device) -> TrainedModel:
    occupancy = {
        "occupancy.occupied": occupied,
        "occupancy.allowed": occupied,
        "occupancy.density_ema_max": torch.zeros(occupied.shape),
        "occupancy.aabb": torch.tensor(BOX),
    }
    return restore_trained_model(settings, field.state_dict(prefix="field.") | occupancy, 7, device)


@pytest.fixture(params=MODELS)
def run(request, device) -> TrainedModel:
    return noise(request.param, device)


@pytest.fixture
def path(tmp_path) -> Path:
    """Where a test may write a model file."""
    return tmp_path / "model.safetensors"


@pytest.fixture
def saved(run, path) -> Path:
    """The model file of a run."""
    save_model(path, run)
    return path


def description_of(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["voxelfield model"][8:])


def vertices_in_file(run: TrainedModel, level: torch.Tensor) -> torch.Tensor:
    """(X, Y, Z) bool, the vertices whose features a model file holds."""
    margin = lattice_spacing(run.field) if can_bake(run.field) else 0.0
    return reached_vertices(run.occupancy.occupied, run.occupancy.aabb, level.shape[:3], run.field.grid.aabb, margin)


def camera(device: torch.device) -> Cameras:
    pose = torch.eye(4)
    pose[:3, 3] = torch.tensor([0.0, -0.5, 5.0])
    return Cameras(pose[None], torch.tensor([[40.0, 40.0, 16.0, 16.0]]), width=32, height=32).to(device)


def test_an_exact_model_that_is_loaded_draws_the_same(run, path, device):
    save_model(path, run, quality="exact")
    loaded = load_model(str(path), str(device))
    assert loaded.steps == 7
    assert replace(loaded.config, logger=run.config.logger) == run.config, "the loggers of a run do not matter"
    assert torch.equal(loaded.occupancy.occupied, run.occupancy.occupied)
    view, expected = (each.renderer().view(camera(device), 0) for each in (loaded, run))
    assert expected.rgb.std() > 0.01
    assert torch.equal(view.rgb, expected.rgb)
    assert torch.equal(view.depth, expected.depth)


@pytest.mark.parametrize("cells", [11, 17])
def test_stored_values_around_cells_are_those_of_an_exact_model(path, device, cells):
    # Faces of occupied cells lie between vertices of the lattice of stored values, and between those of the levels.
    run = noise("deferred shading", device, cells, radius=0.85)
    save_model(path, run, quality="exact")
    loaded = load_model(path, device)
    view, expected = (each.renderer().view(camera(device).enlarged(12), 0) for each in (loaded, run))
    assert torch.equal(view.rgb, expected.rgb)
    assert torch.equal(view.depth, expected.depth)


def test_it_holds_what_occupied_cells_read_and_no_more(run, path):
    save_model(path, run, quality="exact")
    tensors = load_file(path)
    for name, parameter in run.field.named_parameters():
        stored = tensors[f"field.{name}"]
        if any(parameter is level for level in run.field.grid.levels):
            assert stored.dtype == torch.float16
            finest = parameter.shape[0] > 10
            assert stored.numel() < (0.5 if finest else 1.01) * parameter.numel()
        else:
            assert torch.equal(stored, parameter.detach().cpu())
    assert path.stat().st_size < 2.2 * sum(x.numel() for x in tensors.values() if x.dtype == torch.float16) + 40_000


def test_features_too_large_for_float16_stay_float32(run, path):
    with torch.no_grad():
        if run.field.grid.levels[0].dtype == torch.float16:
            pytest.skip("read as float16 on this device")
        run.field.grid.levels[0].fill_(1e5)
    save_model(path, run)
    assert load_model(path, "cpu").field.grid.levels[0].max() == 1e5


@pytest.mark.parametrize("quality", ["exact", "standard", "small"])
def test_sparse_levels_are_stored_with_their_blocks(quality, path, device):
    settings = preset(
        *("scene=lego", f"scene.aabb={[list(corner) for corner in BOX]}", "trainer=smoke", "model=pyramid"),
        *("trainer.stages=[{step: 0, resolution: 40}]", "trainer.occupancy.resolution=12", "model.width=16"),
        *("trainer.finest_resolution=16", "trainer.sparse_resolutions=[40]", "model.resolutions=[4,8,16]"),
    )
    field = settings.model.build(torch.tensor(BOX), settings.trainer.resolutions, "cpu")
    grid = field.grid
    grid.allocate(40, torch.rand(5, 5, 5) < 0.03, grid.aabb)
    grid.activate(40)
    with torch.no_grad():
        for level in grid.levels:
            level.copy_(torch.randn_like(level).half())
        atlas = grid.sparse_grids[0].features
        grid.sparse_grids[0].share(atlas)
        atlas.copy_(atlas.half())
    run = trained(settings, field, torch.ones(12, 12, 12, dtype=torch.bool), device)
    save_model(path, run, quality=quality, cameras=camera(device) if quality == "small" else None)
    loaded = load_model(path, device)
    found, expected = (each.field.grid.sparse_grids[0] for each in (loaded, run))
    assert torch.equal(found.exists, expected.exists)
    assert (found.count, loaded.field.grid.active) == (expected.count, 4)
    rgb, exact = (each.renderer().view(camera(device), 0).rgb for each in (loaded, run))
    assert exact.std() > 0.01
    if quality == "exact":
        assert torch.equal(found.features, expected.features)
        assert torch.equal(rgb, exact)
    else:
        torch.testing.assert_close(rgb, exact, atol=0.1 if quality == "standard" else 0.3, rtol=0)
    found.share(doubled := found.features.detach().clone())
    assert not torch.equal(doubled, found.features), "some vertices have copies"


@pytest.mark.parametrize("resolution", [(2, 3, 40), (17, 9, 33), (1, 12, 13)])
@pytest.mark.parametrize("cells_box", [BOX, ((-1.2, -1.0, 0.0), (0.3, 0.2, 2.5))], ids=["same box", "other box"])
@pytest.mark.parametrize("margin", [0.0, 0.15])
def test_vertices_are_reached_just_where_a_position_reads_them(resolution, cells_box, margin, device):
    occupied = torch.rand(6, 5, 7, device=device) < 0.1
    box, cells = (torch.tensor(x, device=device) for x in (BOX, cells_box))
    reached = reached_vertices(occupied, cells, resolution, box, margin)
    at = occupied.nonzero()
    inside = torch.rand(len(at), 3000, 3, device=device)
    size = (cells[1] - cells[0]) / torch.tensor([6, 5, 7], device=device)
    positions = (cells[0] + (at[:, None] + inside) * size + margin * (2 * inside - 1)).view(-1, 3)
    unit = (positions - box[0]) / (box[1] - box[0])
    grid = torch.zeros(*resolution, 1, device=device, dtype=torch.float64, requires_grad=True)
    sample_trilinear(grid, unit.double(), padding="border").sum().backward()
    read = grid.grad[..., 0] > 0
    assert not (read & ~reached).any()
    # Not every vertex that a position may read is read by some of these; a whole row of them too many would show.
    assert reached.sum() <= 1.3 * read.sum() + 8


@pytest.mark.parametrize(("quality", "share"), [("standard", 0.125), ("small", 0.5)])
def test_features_are_off_by_half_a_step_at_most(run, path, tmp_path, device, quality, share):
    save_model(path, run, quality=quality)
    loaded = load_model(path, device)
    features = 0
    for level, original in zip(loaded.field.grid.levels, run.field.grid.levels, strict=True):
        kept = vertices_in_file(run, level)
        values = original[kept].float()
        step = torch.maximum(share * values.std(dim=0), values.abs().amax(dim=0) / 127)
        off = (level[kept].float() - values).abs()
        assert (off <= 0.51 * step + 1e-3 * values.abs()).all()
        assert off.max() > 0
        assert not level[~kept].any()
        features += original[kept].numel()
    exact = tmp_path / "exact.safetensors"
    save_model(exact, run, quality="exact")
    assert exact.stat().st_size - path.stat().st_size > 0.9 * features, "about a byte of two is saved"


def error_in_images(run: TrainedModel, path: Path, cameras: Cameras, **options: object) -> float:
    """The root of the mean squared error of what is loaded again, against what an exact file shows."""
    save_model(path, run, quality="exact", cameras=cameras)
    exact = load_model(path, run.occupancy.aabb.device).render(cameras).rgb
    save_model(path, run, cameras=cameras, **options)
    return float((load_model(path, run.occupancy.aabb.device).render(cameras).rgb - exact).square().mean().sqrt())


def test_images_are_off_by_about_the_error_asked_for(run, path, device):
    sizes = []
    for quality, wanted in (("standard", 0.001), ("small", 0.0015)):
        found = error_in_images(run, path, camera(device), quality=quality)
        # Errors of neighbouring samples are no more independent than those are.
        assert 0.2 * wanted < found < 3 * wanted
        sizes.append(path.stat().st_size)
    assert sizes[1] < sizes[0]


def test_the_same_run_makes_the_same_file(run, tmp_path, device):
    if device.type == "cuda":
        pytest.skip("sums of importance are rounded in another order each time")
    for name in ("one", "two"):
        save_model(tmp_path / name, run, quality="small", cameras=camera(device))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_features_that_no_image_depends_on_have_no_importance(run, monkeypatch, device):
    monkeypatch.setattr("voxelfield.trained.model_file._CHUNK", 1000)
    found = feature_importance(run.model, camera(device), rays=3000)
    for importance, level in zip(found, run.field.grid.levels, strict=True):
        assert importance.shape == level.shape
        assert importance.max() > 0
        reached = vertices_in_file(run, level)
        assert not importance[~reached].any()
    away = camera(device)
    away.c2w[:, 2, 3] = -50.0
    assert not any(x.any() for x in feature_importance(run.model, away, rays=100))


def test_cells_that_no_camera_sees_are_left_out(run, path, device):
    save_model(path, run, quality="exact", cameras=camera(device).enlarged(4))
    loaded = load_model(path, device)
    assert 0 < loaded.occupancy.fraction() < run.occupancy.fraction()
    view, expected = (each.render(camera(device)) for each in (loaded, run))
    assert expected.rgb.std() > 0.01
    # Pixels are drawn by 2 x 2 rays, cells were marked by the ray through the centre of each.
    torch.testing.assert_close(view.rgb.mean(), expected.rgb.mean(), atol=0.02, rtol=0)


def test_visible_cells_are_those_of_samples_with_weight(run, device):
    settings = RenderSettings(step=0.05, min_weight=0.01)
    close = camera(device).enlarged(2)
    seen = visible_cells(run.field, run.occupancy, settings, close, chunk=1000)
    assert seen.shape == (24, 24, 36)
    rays = close.image_rays(0, run.field.grid.aabb)
    low, high = run.occupancy.aabb
    # All rays at once, each with as many samples as the longest.
    steps = math.ceil(float((rays.far - rays.near).max() / 0.05))
    t = rays.near[:, None] + 0.05 * (torch.arange(steps, device=device) + 0.5)
    points = rays.origins[:, None] + t[..., None] * rays.directions[:, None]
    inside = run.occupancy.contains(points) & (t < rays.far[:, None])
    density = torch.where(inside, run.field.density(points.view(-1, 3)).view(t.shape).float(), 0.0)
    light = torch.exp(-0.05 * (density.cumsum(dim=1) - density))
    shown = points[light * -torch.expm1(-0.05 * density) >= 0.01]
    expected = torch.zeros_like(seen)
    sizes = torch.tensor(seen.shape, device=device)
    cells = ((shown - low) / (high - low) * sizes).long()
    expected[tuple(cells.clamp(torch.zeros_like(sizes), sizes - 1).T)] = True
    # Where a sample lies on a face between cells, or at a threshold, rounding decides.
    assert (seen != expected).sum() <= 0.02 * expected.sum()
    assert expected.sum() > 50


def test_so_many_rays_cross_each_cell(run, device):
    low, high = run.occupancy.aabb
    cells = run.occupancy.occupied.shape
    cell = float(((high - low) / torch.tensor(cells, device=device)).min())
    middle = (low + high) / 2
    for distance, size in ((5.0, 400), (5.0, 50), (0.3, 200), (0.0, 200)):
        c2w = torch.eye(4, device=device)
        c2w[:3, 3] = middle + distance * torch.tensor([0.0, 0.6, 0.8], device=device)
        cameras = Cameras(c2w[None], torch.tensor([[size, size, size / 2, size / 2]], device=device), size, size)
        stride = pixel_stride(run.field, run.occupancy, cameras, across=2)
        farthest = distance + float((high - low).norm()) / 2
        widest = math.sqrt(2) * farthest / size  # between the rays of neighbouring pixels, along the diagonal
        assert stride == 1 or 2 * stride * widest <= cell * (1 + 1e-4)
        assert 2 * (stride + 1) * widest > cell
        assert ray_spacing(run.field, run.occupancy.aabb, cameras) > 0
    assert visible_cells(run.field, run.occupancy, RenderSettings(step=0.05), cameras, every=1000).any()


def test_coarse_images_leave_no_holes(run, device):
    settings = RenderSettings(step=0.05, min_weight=0.01)
    fine, coarse = camera(device).enlarged(4), camera(device)
    coarse = Cameras(coarse.c2w, coarse.intrinsics / 2, 16, 16)
    seen = visible_cells(run.field, run.occupancy, settings, coarse)
    assert seen.shape == run.occupancy.occupied.shape, "pixels are wider than cells"
    assert not (seen & ~run.occupancy.occupied).any()
    packed, _ = visible_samples(run.field, fine.image_rays(0, run.field.aabb), run.occupancy, settings)
    low, high = run.occupancy.aabb
    x, y, z = ((packed.positions - low) / (high - low) * 12).long().clamp(0, 11).unbind(-1)
    assert len(x) > 1000
    # At the outline, a pixel's centre may miss what another part of it shows.
    assert (~seen[x, y, z]).float().mean() < 0.02


@pytest.mark.parametrize("quality", ["exact", "standard"])
def test_a_flipped_bit_is_noticed(run, path, quality):
    save_model(path, run, quality=quality)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(begin, len(whole), (len(whole) - begin) // 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(ModelFileError, match=r"model\.safetensors is damaged: its checksum does not match"):
            load_model(path, "cpu")
    for number, place in enumerate(range(0, begin, begin // 60)):  # the description
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << number % 8]) + whole[place + 1 :])
        with pytest.raises(ModelFileError):
            load_model(path, "cpu")


def test_an_unknown_quality_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="quality must be one of"):
        save_model(tmp_path / "model.safetensors", run, quality="tiny")
    assert not list(tmp_path.iterdir())


def test_a_grid_with_a_feature_that_is_not_finite_is_kept_exactly(run, path):
    with torch.no_grad():
        run.field.grid.levels[-1].fill_(math.nan)
    save_model(path, run)
    loaded = load_model(path, "cpu")
    assert loaded.field.grid.levels[-1].isnan().any()


def spoil(path: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: object) -> None:
    """Changes a file's description and tensors, with checksums that fit, as somebody of bad intent would."""
    stored = load_file(path) | (tensors or {})
    text = json.dumps(description_of(path) | changes)
    save_file(stored, path, {"voxelfield model": with_checksum(text, stored)})


def peak_memory() -> int:
    """The most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def zeros() -> torch.Tensor:
    """1 GiB of zeros, compressed to 1 MiB."""
    compressor = zlib.compressobj(1)
    packed = b"".join(compressor.compress(bytes(1 << 24)) for _ in range(64)) + compressor.flush()
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


@pytest.mark.parametrize("bomb", ["codes", "bits", "shape", "cells", "deep", "network"])
def test_a_file_that_declares_too_much_is_refused_before_memory_is_asked_for(run, saved, bomb, zeros):
    shapes = description_of(saved)["shapes"]
    name = next(iter(shapes))
    if bomb == "deep":
        save_file({"x": torch.ones(2)}, saved, {"voxelfield model": with_checksum("[" * 100_000, {})})
    else:
        changes: dict[str, dict[str, object]] = {
            "codes": {"tensors": {name: zeros}},
            "bits": {"tensors": {"occupancy.bits": zeros}},
            "shape": {"shapes": shapes | {name: [4096, 4096, 64, shapes[name][3]]}},
            "cells": {"occupancy": [4096, 4096, 128]},
        }
        if bomb == "network":
            if run.config.model.kind != "dense":
                pytest.skip("the width of fused networks is bounded")
            config = asdict(run.config)
            config["model"]["width"] = 40_000
            changes["network"] = {"config": config}
        spoil(saved, **changes[bomb])
    before = peak_memory()
    with pytest.raises(ModelFileError, match=r"do not fit together|is not a voxelfield model") as raised:
        load_model(saved, "cpu")
    assert "\n" not in str(raised.value)
    assert peak_memory() - before < 300e6


WRONG_SHAPES = [[-4, -4, 4, 4], [4, 4, 4], [4.0, 4, 4, 4], "4444", None, [True, 4, 4, 4], [0, 4, 4, 4]]


def test_a_description_of_impossible_values_is_refused(run, saved):
    description = description_of(saved)
    shapes, settings, stored = description["shapes"], description["settings"], load_file(saved)
    name, step = next(iter(shapes)), next(key for key in stored if key.startswith("step/"))

    def refused(message: str, tensors: dict[str, torch.Tensor] | None = None, **changes: object) -> None:
        save_file(stored, saved, {"voxelfield model": with_checksum(json.dumps(description), stored)})
        spoil(saved, tensors, **changes)
        with pytest.raises(ModelFileError, match=message):
            voxelfield.load(saved, "cpu")

    for sizes in WRONG_SHAPES:
        refused("must be 4 positive whole numbers", shapes=shapes | {name: sizes})
    for shape in ((1,), (1000, 1, 1), ()):
        refused(r"the steps of \S+ must be", {step: torch.ones(shape)})
    for active in (0, 99, -1, 1.5, "all", None) if settings else ():
        refused("active must be 1 to", settings={key: value | {"active": active} for key, value in settings.items()})
    refused(
        r"model\.safetensors: configuration has no key trainer\.stageq",
        config=asdict(run.config) | {"trainer": {"stageq": 1}},
    )


def test_what_was_verified_is_what_is_used_whatever_happens_to_the_file(run, path):
    save_model(path, run, quality="exact")
    loaded, expected = load_model(path, "cpu"), load_model(path, "cpu").field.state_dict()
    expected = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in expected.items()}
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
        file.truncate(1)  # reading a mapped file would now end this process
    for name, tensor in loaded.field.state_dict().items():
        assert not isinstance(tensor, torch.Tensor) or torch.equal(tensor, expected[name]), name


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="must be a file, got a named pipe"):
        voxelfield.load(tmp_path / "model.safetensors", "cpu")
    with pytest.raises(FileNotFoundError, match="contains no checkpoint"):
        voxelfield.load(tmp_path, "cpu")


def test_settings_of_a_file_are_plain_data(run, saved, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    again = tmp_path / "again.safetensors"
    names = {"doubling": "${scene.name}" * 3000, "malformed": "${" * 30_000, "token": "${oc.env:TOKEN}"}
    for name in names.values():
        spoil(saved, config=asdict(run.config) | {"scene": asdict(run.config.scene) | {"name": name}})
        loaded = load_model(saved, "cpu")
        assert loaded.config.scene.name == name
    assert "secret" not in repr(loaded)
    save_model(again, loaded)
    assert b"secret" not in again.read_bytes()
    for value in ("${seed}", "${" * 30_000, "???"):
        spoil(saved, config=asdict(run.config) | {"trainer": {"steps": value}})
        with pytest.raises(ModelFileError, match=r"trainer\.steps must be an integer, got '[$?]") as raised:
            load_model(saved, "cpu")
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("occupancy.aabb", lambda x: x * torch.tensor([1.0, 1.0, 0.0]), "must be finite with low < high"),
        ("occupancy.aabb", lambda x: x * math.nan, "must be finite with low < high"),
        ("occupancy.aabb", lambda x: x.double(), r"must be float32 of shape \(2, 3\), got torch\.float64"),
        ("occupancy.aabb", lambda x: x[:1], r"must be float32 of shape \(2, 3\), got torch\.float32 of shape \(1, 3\)"),
        ("aabb", lambda x: x.flip(0), "must be finite with low < high"),
        ("aabb", lambda x: x.half(), r"must be float32 of shape \(2, 3\), got torch\.float16"),
        ("weight", lambda x: x.to(torch.complex64), r"must be torch\.float32, got torch\.complex64"),
        ("weight", lambda x: x.double(), r"must be torch\.float32, got torch\.float64"),
        ("weight", lambda x: x.to(torch.int8), r"must be torch\.float32, got torch\.int8"),
        ("features", lambda x: x.to(torch.complex64), r"must be torch\.float32 or .*, got torch\.complex64"),
        ("features", lambda x: x[:1].clone(), "must have shape"),
    ],
)
def test_tensors_that_no_run_saves_are_refused_by_name(run, path, name, change, message):
    save_model(path, run, quality="exact")
    stored = load_file(path)
    keys = [key for key in sorted(stored) if key.endswith(name) and (name[0] == "o" or key.startswith("field."))]
    if not keys:
        pytest.skip("a field without a network")
    spoil(path, {keys[0]: change(stored[keys[0]]).contiguous()})
    with pytest.raises(ModelFileError, match=message) as raised:
        load_model(path, "cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("voxels", [1e-5, 1e-300])
def test_a_step_with_which_an_image_takes_hours_is_refused(run, saved, voxels):
    trainer = asdict(run.config.trainer)
    spoil(saved, config=asdict(run.config) | {"trainer": trainer | {"render": {"voxels_per_step": voxels}}})
    with pytest.raises(ModelFileError, match=r"trainer\.render\.voxels_per_step must be at least 0\.0\d+, so that"):
        load_model(saved, "cpu")


def test_what_is_no_model_is_refused_by_name(run, path):
    with pytest.raises(FileNotFoundError, match=r"no model file .*model\.safetensors"):
        load_model(path, "cpu")
    save_model(path, run)
    whole, other = path.read_bytes(), path.with_name("other")
    save_file({"x": torch.ones(2)}, other)
    for content, changes, message in (
        (b"nothing of the kind", {}, r"model\.safetensors is not a voxelfield model, or is damaged"),
        (other.read_bytes(), {}, "is not a voxelfield model"),
        (whole[:-100], {}, "damaged"),
        (whole, {"occupancy": [12, 12, 5]}, "parts do not fit together"),
        (whole, {"steps": None, "settings": 3}, "parts do not fit together"),
        (whole, {"config": {"model": {"kind": "sh"}}}, r"configuration|parts do not fit together"),
        (whole, {"format": FORMAT + 1}, rf"has format {FORMAT + 1}; .* reads format {FORMAT}: upgrade voxelfield$"),
        (whole, {"format": FORMAT - 1}, rf"has format {FORMAT - 1}; .*: export the run again with this version$"),
    ):
        path.write_bytes(content)
        if changes:
            spoil(path, **changes)
        with pytest.raises(ModelFileError, match=message):
            load_model(path, "cpu")


def test_load_takes_a_file_or_its_folder(run, saved, tmp_path, device):
    points = torch.rand(4, 5, 3, device=device) - 0.5
    for path in (tmp_path, saved):
        loaded = voxelfield.load(path, str(device))
        assert loaded.density(points).shape == (4, 5)
        view = loaded.render(camera(device))
        torch.testing.assert_close(view.rgb, run.render(camera(device), 0).rgb, atol=0.1, rtol=0)
    assert voxelfield.load(tmp_path).steps == 7
    torch.save({}, tmp_path / "other.pt")
    assert voxelfield.load(tmp_path).steps == 7, "a file that is no checkpoint"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        voxelfield.load(tmp_path / "elsewhere")
