"""Records of runs that tests make reports of."""

from __future__ import annotations

from typing import Any

import torch

from voxelfield.models.dense import DenseConfig
from voxelfield.rendering.render import View
from voxelfield.report.record import RunRecord
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.settings import RunConfig, SceneConfig

METRICS = {
    "scene": "bricks",
    "split": "test",
    "psnr": 30.0,
    "ssim": 0.95,
    "views": 3,
    "steps": 1000,
    "train_seconds": 12.5,
    "train_views": 100,
    "image_size": [12, 8],
    "device": "cpu",
    "resolution": [31, 32, 33],
    "drawn_by": "render_view",
    "seconds": {"load": 1.0, "train": 14.0, "evaluate": 4.0, "write": 1.0},
    "estimated_gib": {"parameters": 0.5, "copies": 0.0, "samples": 1.5},
    "peak_host_gib": 2.25,
    "environment": {"torch": "2.13.0", "python": "3.11.7"},
    "per_view": [
        {"name": "r_0", "psnr": 31.0, "ssim": 0.96},
        {"name": "r_1", "psnr": 28.0, "ssim": 0.93},
        {"name": "r_2", "psnr": 31.0, "ssim": 0.96},
    ],
}


def flat_view(height: int, width: int, rgb: float = 0.5, depth: float = 4.0) -> View:
    """An image of one colour, at one depth, opaque everywhere."""
    return View(torch.full((height, width, 3), rgb), torch.ones(height, width), torch.full((height, width), depth))


def pictures(*names: str, height: int = 8, width: int = 12) -> dict[str, Any]:
    thumbnails = Thumbnails(len(names))
    for name in names:
        thumbnails.add(name, flat_view(height, width), torch.full((height, width, 3), 0.25), None)
    return thumbnails.pictures()


def make_record(**changes: Any) -> RunRecord:
    """A record of a run that went well; keys of metrics.json and fields of the record may be changed."""
    fields = {name: changes.pop(name) for name in [*changes] if name in RunRecord.__dataclass_fields__}
    config = RunConfig(model=DenseConfig(), scene=SceneConfig("bricks"))
    history = {
        "train/psnr": ((100, 20.0), (500, 30.0), (1000, 31.5)),
        "test/psnr": ((500, 29.9), (900, 30.0), (1000, 30.0)),
        "train/occupancy": ((100, 0.3), (1000, 0.05)),
        "train/rays_per_second": ((100, 1e5), (1000, 2e5)),
        "loss/photometric": ((100, 1e-2), (1000, 1e-3)),
    }
    return RunRecord(METRICS | changes, config, **({"history": history} | fields))
