"""A field that takes a second to train, for the tests of the viewer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from free_ports import free_port

import voxelfield
from voxelfield.datasets.scene import Scene
from voxelfield.models.dense import DenseConfig
from voxelfield.runs.watching import TrainingViewer
from voxelfield.settings import LoggerConfig, StageConfig, TrainerConfig, preset
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.training.session import Session

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


def watched(**options: Any) -> tuple[TrainingViewer, Session]:
    """A training that has begun, and its viewer."""
    viewer = TrainingViewer(LoggerConfig(viewer_port=free_port()))
    training = session(on_step=viewer.after_step, **options)
    viewer.begin(training)
    return viewer, training


@functools.cache
def trained_run() -> TrainedModel:
    done = session()
    done.fit()
    return done.result()


@contextlib.contextmanager
def served_page(host: str = "127.0.0.1", name: str = "RUN") -> Iterator[Any]:
    """The page of the trained run, served at ``page.address``."""
    from voxelfield.viewer.address import Address
    from voxelfield.viewer.page import ViewerPage, photographs_of

    photographs = photographs_of(bricks(), ("train", "test"), None)
    page = ViewerPage(Address(host, free_port()), trained_run(), Path(name), photographs)
    try:
        yield page
    finally:
        page.close()
