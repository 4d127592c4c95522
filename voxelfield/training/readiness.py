"""Work that a run has before it in any case, done while the photographs are decoded."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from voxelfield.datasets.scene import Split
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.render import View
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.training.config import LoggerConfig
from voxelfield.training.evaluation import evaluate_split
from voxelfield.training.metrics import WINDOW


def make_ready(device: torch.device, logger: LoggerConfig) -> None:
    """Does beforehand what training begins with, and what takes a second each: meant for the time of decoding images.

    Args:
        device: Where training takes place; its context is created, and kernels that judge views are loaded.
        logger: The configured logger; what it needs is imported.
    """
    if device.type == "cuda":
        _load_kernels_that_judge(device)
    if logger.name == "tensorboard" and importlib.util.find_spec("tensorboard") is not None:
        importlib.import_module("torch.utils.tensorboard")


def _load_kernels_that_judge(device: torch.device) -> None:
    """Judges a small black view, because CUDA loads a kernel when it is first launched.

    For all kernels that judge a view, that takes about a third of a second.
    """
    black = torch.zeros(WINDOW, WINDOW, 3, device=device)
    view = View(black, black[..., 0], black[..., 0])
    cameras = Cameras(torch.eye(4)[None], torch.full((1, 4), float(WINDOW)), WINDOW, WINDOW)
    split = Split(torch.zeros(1, WINDOW, WINDOW, 4, dtype=torch.uint8), cameras, ("black",))
    evaluate_split(lambda *_: view, split, black[0, 0], None, on_view=Thumbnails(1).add, progress=False)
