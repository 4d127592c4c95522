"""A field that takes a second to train, for the tests of the viewer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from free_ports import free_port

import voxelfield
from voxelfield.datasets.scene import Scene
from voxelfield.models.dense import DenseConfig
from voxelfield.training.config import StageConfig, TrainerConfig, preset
from voxelfield.training.session import Session
from voxelfield.training.trained_model import TrainedModel
from voxelfield.warps.choice import WarpConfig

SIZE = 40


@functools.cache
def bricks() -> Scene:
    return voxelfield.load_scene("bricks", image_size=SIZE)


def short_trainer(steps: int) -> TrainerConfig:
    settings = preset("model=dense", "trainer=smoke", device="cpu").trainer
    occupancy = replace(settings.occupancy, resolution=16, start=10, every=10)
    return replace(
        settings,
        steps=steps,
        stages=[StageConfig(0, 24, crop=True)],
        occupancy=occupancy,
        max_rays=1024,
        log_every=10,
        preview_every=0,
        checkpoint_every=0,
        image_size=SIZE,
    )


def session(steps: int = 40, **options) -> Session:
    return Session(bricks(), DenseConfig(features=3, width=16), trainer=short_trainer(steps), device="cpu", **options)


@functools.cache
def nested_run() -> TrainedModel:
    """A run over nested boxes, of which training has seen next to nothing."""
    model, warp = DenseConfig(features=3, width=16), WarpConfig(boxes=3, near=0.0)
    done = Session(bricks(), model, trainer=short_trainer(2), warp=warp, device="cpu")
    done.fit()
    return done.result()


@functools.cache
def trained_run() -> TrainedModel:
    done = session()
    done.fit()
    return done.result()


@contextlib.contextmanager
def served_page(host: str = "127.0.0.1", name: str = "RUN", live: Any = None) -> Iterator[Any]:
    """The page of the trained run, as it is served by ``page.address``."""
    from voxelfield.viewer.curves import Curves
    from voxelfield.viewer.drawing.painter import content_boxes
    from voxelfield.viewer.drawing.photographs import Photographs
    from voxelfield.viewer.page.address import Address
    from voxelfield.viewer.page.viewer_page import ViewerPage
    from voxelfield.viewer.scheduling.source import FinishedRun

    run = trained_run()
    page = ViewerPage(
        Address(host, free_port()),
        "bricks",
        name,
        FinishedRun(run),
        Photographs.of(bricks(), ("train", "test"), None),
        content_boxes(run),
        torch.ones(3),
        Curves(),
        live,
    )
    try:
        yield page
    finally:
        page.close()
