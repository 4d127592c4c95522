"""A stranger's field, a sum of Gaussians, from training to every kind of file, with a loss, a sampler and a state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import Literal

import pytest
import torch
from torch import nn

import voxelfield
from voxelfield import Field, Model, Session, ops
from voxelfield.config import Count
from voxelfield.export import save_model
from voxelfield.export.mesh import FieldSurface
from voxelfield.export.volume import save_volume
from voxelfield.models import ModelConfig, model_config
from voxelfield.rendering.paths import path_named
from voxelfield.settings import preset
from voxelfield.trained.checkpoint_file import load_checkpoint

INTERVALS = 16


class Gaussians(Field, nn.Module):
    """Densities and colours of Gaussians, and a tint of each image."""

    extra_inputs = optional_inputs = ("image",)

    def __init__(self, aabb, count):
        super().__init__()
        self.register_buffer("aabb", aabb)
        low, high = aabb
        self.centres = nn.Parameter(low + (high - low) * torch.rand(count, 3, device=aabb.device))
        self.raw = nn.Parameter(torch.zeros(count, 4))
        self.tints = nn.Embedding(100, 3)

    def mix(self, points):
        near = torch.exp(-10 * torch.cdist(points, self.centres).square())
        return near * nn.functional.softplus(self.raw[:, 0])

    def density(self, points):
        return 10 * self.mix(points).sum(dim=1)

    def sample(self, samples, directions, image=None):
        mix = self.mix(samples.positions)
        total = mix.sum(dim=1)
        rgb = mix @ self.raw[:, 1:] / total.clamp(min=1e-6)[:, None]
        if image is not None:
            rgb = rgb + self.tints(image)[samples.ray_index]
        return 10 * total, torch.sigmoid(rgb)


class GaussiansModel(Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("steps", torch.zeros((), device=self.device))

    def after_step(self, step):
        self.steps += 1


@dataclass
class GaussiansConfig(ModelConfig):
    kind: Literal["gaussians"] = "gaussians"
    count: Count = 30

    def build(self, aabb, resolutions, device):
        return Gaussians(aabb.to(device), self.count).to(device)

    def build_model(self, field, occupancy, sampling):
        return GaussiansModel(field, occupancy, sampling)


def inverse_depths(field, rays, occupancy, settings, jitter=False, capacity=None):
    """Equal steps of inverse depth, everywhere."""
    near = rays.near.clamp(min=1e-3)
    share = torch.linspace(0, 1, INTERVALS + 1)
    edges = 1 / torch.lerp(1 / near[:, None], 1 / torch.maximum(rays.far, near + 1e-3)[:, None], share)
    middles = (edges[:, 1:] + edges[:, :-1]) / 2
    points = rays.origins[:, None] + middles[..., None] * rays.directions[:, None]
    offsets = torch.arange(len(rays) + 1) * INTERVALS
    index = torch.arange(len(rays)).repeat_interleave(INTERVALS)
    kept = torch.full((1,), len(rays))
    return ops.PackedSamples(points.view(-1, 3), middles.flatten(), edges.diff().flatten(), index, offsets, kept), None


def smooth_depth(outputs, batch):
    side = batch.patch_size
    depth = outputs.rendering.depth_sum.view(-1, batch.rays_per_pixel).mean(dim=1)
    squares = depth[: batch.patches * side**2].view(batch.patches, side, side)
    return 1e-3 * (squares.diff(dim=1).abs().mean() + squares.diff(dim=2).abs().mean())


@pytest.fixture
def scene():
    return voxelfield.load_scene("bricks", image_size=25)


def test_a_field_without_a_grid_goes_everywhere(scene, tmp_path, monkeypatch):
    entry = EntryPoint("gaussians", f"{__name__}:GaussiansConfig", model_config.ENTRY_POINTS)
    monkeypatch.setattr(model_config, "entry_points", lambda group: [entry])
    loop = replace(preset("model=dense", "trainer=smoke", device="cpu").trainer, steps=4, patches=2, patch_size=4)
    common = {"optimizer": "adamw", "device": "cpu", "losses": {"smooth": smooth_depth}, "sampler": inverse_depths}
    Session(scene, GaussiansConfig(), trainer=loop, output=tmp_path, **common).fit()
    session = Session(scene, GaussiansConfig(), trainer=replace(loop, steps=6), output=tmp_path, **common)
    session.restore(load_checkpoint(tmp_path))
    session.fit()
    run = voxelfield.load(tmp_path, device="cpu")
    assert repr(run) == "TrainedModel(scene='bricks', model='gaussians', steps=6, device=cpu)"
    assert int(run.model.steps) == 6
    psnr = session.evaluate(views=1, progress=False).psnr
    assert run.evaluate(scene.test, views=1, progress=False).psnr == psnr
    assert run.render(scene.train.cameras.with_values(image=3), 0).rgb.isfinite().all()
    assert len(path_named(None, scene.train.cameras, 3, run.model.centre, run.model.warp, run.render)) == 3
    assert run.overview(16).rgb.isfinite().all()
    for quality in ("exact", "small"):
        save_model(tmp_path / "g.safetensors", run, quality=quality)
        again = voxelfield.load(tmp_path / "g.safetensors", device="cpu")
        assert again.evaluate(scene.test, views=1, progress=False).psnr == pytest.approx(psnr, abs=1e-3)
        assert int(again.model.steps) == 6
    mesh = FieldSurface(run.model, resolution=12, level=1.0).mesh()
    assert mesh.colors.shape == mesh.vertices.shape
    save_volume(str(tmp_path / "g.npz"), run.model, resolution=6)
