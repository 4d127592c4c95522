"""The settings of a training run, with types, ranges and defaults; ``configs/`` has presets."""

from voxelfield.components.refinement import CameraStageConfig
from voxelfield.config import parse
from voxelfield.models.settings import StageConfig
from voxelfield.settings.presets import compose, preset
from voxelfield.settings.schema import (
    CameraConfig,
    DataConfig,
    EvaluationConfig,
    LoggerConfig,
    LossConfig,
    OccupancyConfig,
    OptimizerConfig,
    RatesConfig,
    RenderConfig,
    RunConfig,
    SceneConfig,
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
