"""Export of trained fields. The names exported here are those of the model file."""

from voxelfield.export.model_file import ModelFileError, save_model

__all__ = ["ModelFileError", "save_model"]
