"""Models, the units of training, rendering and saving: one file per kind, looked up by name."""

from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.component import Component, Loss
from voxelfield.models.model import Model
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.settings import Sampling

__all__ = ["Batch", "Component", "Loss", "Model", "ModelConfig", "Outputs", "Sampling"]
