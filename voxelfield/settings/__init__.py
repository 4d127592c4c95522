"""The settings of a training run, with types, ranges and defaults; ``configs/`` has presets."""

from __future__ import annotations

from voxelfield.config import parse
from voxelfield.settings.camera import CameraConfig, CameraStageConfig
from voxelfield.settings.presets import compose, preset
from voxelfield.settings.run import DataConfig, LoggerConfig, RunConfig, SceneConfig
from voxelfield.settings.trainer import (
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
    "compose",
    "parse",
    "preset",
]
