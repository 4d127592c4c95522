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
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.ops import sample_trilinear
from voxelfield.rendering.cameras import Cameras
from voxelfield.training.config import TrainerConfig, parse
from voxelfield.training.trained import TrainedRun, restore_run

ROOT = Path(__file__).resolve().parents[1]
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


def test_a_model_that_is_loaded_draws_the_same(run, tmp_path, device):
    save_model(tmp_path / "model.safetensors", run)
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
    save_model(path, run)
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
        assert torch.equal(view.rgb, run.render(camera(device), 0).rgb)
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
