"""The model file: small, complete, and refused by name where it is not sound."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import voxelfield
from voxelfield.export import load_model, save_model
from voxelfield.export.model_file import FORMAT, ModelFileError
from voxelfield.export.reached import reached_vertices
from voxelfield.export.visible import visible_cells
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.ops import sample_trilinear
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import RenderSettings
from voxelfield.training.config import TrainerConfig, parse
from voxelfield.training.trained import TrainedRun, restore_run

ROOT = Path(__file__).resolve().parents[2]
BOX = ((-1.0, -1.5, -1.0), (1.0, 0.5, 2.0))
MODELS = {
    "render_pyramid_image": ("model=pyramid", "model.resolutions=[4,8,16]", "model.width=16"),
    "render_grid_image": ("model=sh", "model.resolutions=[4,16]"),
    "render_view": ("model=mlp",),
}


@pytest.fixture(params=MODELS)
def run(request, device) -> TrainedRun:
    """A field of noise, of which a ball is occupied."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        stages = "trainer.stages=[{step: 0, resolution: 16}]"
        overrides = ["scene=lego", "trainer=smoke", stages, "trainer.occupancy.resolution=12", *MODELS[request.param]]
        config = compose("train_cpu", overrides=[*overrides, f"scene.aabb={[list(corner) for corner in BOX]}"])
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    resolutions = parse(TrainerConfig, config.trainer, "trainer").resolutions
    field = parse(Recipe, config.model, "model").build(torch.tensor(BOX), resolutions, "cpu")
    with torch.no_grad():
        for level in field.grid.levels:
            level.copy_(torch.randn_like(level).half())
    axes = torch.meshgrid(*[torch.linspace(-1, 1, 12)] * 3, indexing="ij")
    ball = torch.stack(axes).norm(dim=0) < 0.6
    occupancy = {"occupied": ball, "possible": ball, "highest": torch.zeros(12, 12, 12), "aabb": torch.tensor(BOX)}
    return restore_run(config, field.state_dict(), occupancy, 7, device)


def camera(device: torch.device) -> Cameras:
    pose = torch.eye(4)
    pose[:3, 3] = torch.tensor([0.0, -0.5, 5.0])
    return Cameras(pose[None], torch.tensor([[40.0, 40.0, 16.0, 16.0]]), width=32, height=32).to(device)


def test_an_exact_model_that_is_loaded_draws_the_same(run, tmp_path, device):
    save_model(tmp_path / "model.safetensors", run, quality="exact")
    loaded = load_model(str(tmp_path / "model.safetensors"), str(device))
    assert loaded.steps == 7
    assert loaded.config == run.config
    assert torch.equal(loaded.occupancy.occupied, run.occupancy.occupied)
    view, expected = (each.renderer().view(camera(device), 0) for each in (loaded, run))
    assert expected.rgb.std() > 0.01
    assert torch.equal(view.rgb, expected.rgb)
    assert torch.equal(view.depth, expected.depth)


def test_it_holds_what_occupied_cells_read_and_no_more(run, tmp_path):
    path = tmp_path / "model.safetensors"
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


def test_features_too_large_for_float16_stay_float32(run, tmp_path):
    with torch.no_grad():
        if run.field.grid.levels[0].dtype == torch.float16:
            pytest.skip("read as float16 on this device")
        run.field.grid.levels[0].fill_(1e5)
    save_model(tmp_path / "model.safetensors", run)
    assert load_model(tmp_path / "model.safetensors").field.grid.levels[0].max() == 1e5


@pytest.mark.parametrize("resolution", [(2, 3, 40), (17, 9, 33), (1, 12, 13)])
@pytest.mark.parametrize("cells_box", [BOX, ((-1.2, -1.0, 0.0), (0.3, 0.2, 2.5))], ids=["same box", "other box"])
def test_vertices_are_reached_just_where_a_position_reads_them(resolution, cells_box, device):
    occupied = torch.rand(6, 5, 7, device=device) < 0.1
    box, cells = (torch.tensor(x, device=device) for x in (BOX, cells_box))
    reached = reached_vertices(occupied, cells, resolution, box)
    at = occupied.nonzero()
    inside = (at[:, None] + torch.rand(len(at), 3000, 3, device=device)) / torch.tensor([6, 5, 7], device=device)
    positions = cells[0] + inside.view(-1, 3) * (cells[1] - cells[0])
    unit = (positions - box[0]) / (box[1] - box[0])
    grid = torch.zeros(*resolution, 1, device=device, dtype=torch.float64, requires_grad=True)
    sample_trilinear(grid, unit.double(), padding="border").sum().backward()
    read = grid.grad[..., 0] > 0
    assert not (read & ~reached).any()
    # Not every vertex that a position may read is read by some of these; a whole row of them too many would show.
    assert reached.sum() <= 1.3 * read.sum() + 8


@pytest.mark.parametrize(("quality", "steps"), [("standard", 127), ("small", 64)])
def test_features_are_off_by_half_a_step_at_most(run, tmp_path, device, quality, steps):
    path = tmp_path / "model.safetensors"
    save_model(path, run, quality=quality)
    loaded = load_model(path, device)
    features = 0
    for level, original in zip(loaded.field.grid.levels, run.field.grid.levels, strict=True):
        kept = reached_vertices(run.occupancy.occupied, run.occupancy.aabb, level.shape[:3], run.field.grid.aabb)
        step = original[kept].float().abs().amax(dim=0) / steps
        off = (level[kept].float() - original[kept].float()).abs()
        assert (off <= 0.51 * step + 1e-3 * original[kept].float().abs()).all()
        assert off.max() > 0
        assert not level[~kept].any()
        features += original[kept].numel()
    exact = tmp_path / "exact.safetensors"
    save_model(exact, run, quality="exact")
    assert exact.stat().st_size - path.stat().st_size > 0.9 * features, "about a byte of two is saved"


def test_cells_that_no_camera_sees_are_left_out(run, tmp_path, device):
    path = tmp_path / "model.safetensors"
    save_model(path, run, quality="exact", cameras=camera(device))
    loaded = load_model(path, device)
    assert 0 < loaded.occupancy.fraction() < run.occupancy.fraction()
    view, expected = (each.render(camera(device)) for each in (loaded, run))
    assert expected.rgb.std() > 0.01
    # Pixels are drawn by 2 x 2 rays, cells were marked by the ray through the centre of each.
    torch.testing.assert_close(view.rgb.mean(), expected.rgb.mean(), atol=0.02, rtol=0)


def test_visible_cells_are_those_of_samples_with_weight(run, device):
    settings = RenderSettings(step=0.05, min_weight=0.01)
    seen = visible_cells(run.field, run.occupancy, settings, camera(device), resolution=20, chunk=100)
    rays = camera(device).image_rays(0, run.field.grid.aabb)
    low, high = run.occupancy.aabb
    expected = torch.zeros_like(seen)
    for origin, direction, near, far in zip(rays.origins, rays.directions, rays.near, rays.far, strict=True):
        t = near + 0.05 * (torch.arange(math.ceil(float((far - near) / 0.05)), device=device) + 0.5)
        points = origin + t[:, None] * direction
        inside = run.occupancy.holds(points) & (t < far)
        density = torch.where(inside, run.field.density(points).float(), 0.0)
        light = torch.exp(-0.05 * (density.cumsum(0) - density))
        shows = light * -torch.expm1(-0.05 * density) >= 0.01
        x, y, z = ((points[shows] - low) / (high - low) * 20).long().clamp(0, 19).unbind(-1)
        expected[x, y, z] = True
    # Where a sample lies on a face between cells, or at a threshold, rounding decides.
    assert (seen != expected).sum() <= 0.02 * expected.sum()
    assert expected.sum() > 50


@pytest.mark.parametrize("quality", ["exact", "standard"])
def test_a_flipped_bit_is_noticed(run, tmp_path, quality):
    path = tmp_path / "model.safetensors"
    save_model(path, run, quality=quality)
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in range(begin, len(whole), (len(whole) - begin) // 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(ModelFileError, match=r"model\.safetensors is damaged: the checksum of \S+ is not"):
            load_model(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quality": "tiny"}, "quality must be one of"),
        ({"steps": 200}, r"steps must lie in 1\.\.127, got 200"),
    ],
)
def test_settings_that_make_no_sense_are_refused(run, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        save_model(tmp_path / "model.safetensors", run, **options)
    assert not list(tmp_path.iterdir())


def test_a_grid_with_a_feature_that_is_not_finite_is_kept_exactly(run, tmp_path):
    with torch.no_grad():
        run.field.grid.levels[-1].fill_(math.nan)
    save_model(tmp_path / "model.safetensors", run)
    loaded = load_model(tmp_path / "model.safetensors")
    assert loaded.field.grid.levels[-1].isnan().any()


def spoil(path: Path, **changes: object) -> None:

    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()["voxelfield model"])
    save_file(load_file(path), path, {"voxelfield model": json.dumps(description | changes)})


def test_what_is_no_model_is_refused_by_name(run, tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match=r"no model file .*model\.safetensors"):
        load_model(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ModelFileError, match=r"model\.safetensors is no voxelfield model, or damaged"):
        load_model(path)
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(ModelFileError, match="is no voxelfield model"):
        load_model(path)
    save_model(path, run)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelFileError, match="damaged"):
        load_model(path)
    path.write_bytes(whole)
    spoil(path, occupancy=[12, 12, 5])
    with pytest.raises(ModelFileError, match="parts do not fit together"):
        load_model(path)
    path.write_bytes(whole)
    spoil(path, steps=None, settings=3)
    with pytest.raises(ModelFileError, match="parts do not fit together"):
        load_model(path)
    path.write_bytes(whole)
    spoil(path, config={"model": {"kind": "sh"}})
    with pytest.raises(ValueError, match=r"configuration|parts do not fit together"):
        load_model(path)
    path.write_bytes(whole)
    spoil(path, format=FORMAT + 1)
    with pytest.raises(ModelFileError, match=rf"has format {FORMAT + 1}; this version reads format {FORMAT}: upgrade"):
        load_model(path)


def test_load_takes_a_file_or_its_folder(run, tmp_path, device):
    save_model(tmp_path / "model.safetensors", run)
    points = torch.rand(4, 5, 3, device=device) - 0.5
    for path in (tmp_path, tmp_path / "model.safetensors"):
        loaded = voxelfield.load(path, str(device))
        assert loaded.density(points).shape == (4, 5)
        view = loaded.render(camera(device))
        torch.testing.assert_close(view.rgb, run.render(camera(device), 0).rgb, atol=0.1, rtol=0)
    assert voxelfield.load(tmp_path).steps == 7
    torch.save({}, tmp_path / "other.pt")
    assert voxelfield.load(tmp_path).steps == 7, "a file that is no checkpoint"
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        voxelfield.load(tmp_path / "elsewhere")


def test_density_is_what_rendering_sees(run, device):
    centres = torch.stack(torch.meshgrid(*[(torch.arange(12, device=device) + 0.5) / 12] * 3, indexing="ij"), dim=-1)
    low, high = run.occupancy.aabb
    density = run.density(low + centres * (high - low))
    assert torch.equal(density > 0, run.occupancy.occupied)
    outside = torch.tensor([[9.0, 0, 0], [math.nan, 0, 0]], device=device)
    assert run.density(outside).tolist() == [0, 0]
