"""The settings of a training run, with types, ranges and defaults; ``configs/`` has presets."""

from __future__ import annotations

from voxelfield.config import parse
from voxelfield.training.config.camera import CameraConfig, CameraStageConfig
from voxelfield.training.config.presets import complete, compose, config_name, preset, trainer_for
from voxelfield.training.config.run import DataConfig, LoggerConfig, RunConfig, SceneConfig
from voxelfield.training.config.trainer import (
    EvaluationConfig,
    LossConfig,
    OccupancyConfig,
    OptimizerConfig,
    RatesConfig,
    RenderConfig,
    StageConfig,
    TrainerConfig,
)

__all__ = [
    "CameraConfig",
    "CameraStageConfig",
    "DataConfig",
    "EvaluationConfig",
    "LoggerConfig",
    "LossConfig",
    "OccupancyConfig",
    "OptimizerConfig",
    "RatesConfig",
    "RenderConfig",
    "RunConfig",
    "SceneConfig",
    "StageConfig",
    "TrainerConfig",
    "complete",
    "compose",
    "config_name",
    "parse",
    "preset",
    "trainer_for",
]
