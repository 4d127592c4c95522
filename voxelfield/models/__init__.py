"""Models, the units of training, rendering and saving: one file per kind, looked up by name."""

from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.model import Model
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.part import Loss, Part
from voxelfield.models.settings import Sampling

__all__ = ["Batch", "Loss", "Model", "ModelConfig", "Outputs", "Part", "Sampling"]
