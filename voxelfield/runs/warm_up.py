"""Preparations that every run needs, made while the photographs are decoded."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import evaluate_split
from voxelfield.evaluation.metrics import WINDOW
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.render import View
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.training.config import LoggerConfig


def warm_up(device: torch.device, logger: LoggerConfig) -> None:
    """Makes slow preparations for training, each about a second, in parallel with the decoding of images.

    Args:
        device: Device of the training; its context is created, and the kernels of the evaluation are loaded.
        logger: Settings of the logger; the packages that it needs are imported.
    """
    if device.type == "cuda":
        _load_evaluation_kernels(device)
    if logger.name == "tensorboard" and importlib.util.find_spec("tensorboard") is not None:
        importlib.import_module("torch.utils.tensorboard")


def _load_evaluation_kernels(device: torch.device) -> None:
    """Evaluates a small black view, because CUDA loads a kernel when it is first launched.

    Loading all kernels of the evaluation takes about a third of a second.
    """
    black = torch.zeros(WINDOW, WINDOW, 3, device=device)
    view = View(black, black[..., 0], black[..., 0])
    cameras = Cameras(torch.eye(4)[None], torch.full((1, 4), float(WINDOW)), WINDOW, WINDOW)
    split = Split(torch.zeros(1, WINDOW, WINDOW, 4, dtype=torch.uint8), cameras, ("black",))
    evaluate_split(lambda *_: view, split, black[0, 0], on_view=[Thumbnails(1).add], progress=False)
