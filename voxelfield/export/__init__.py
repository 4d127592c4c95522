"""Export of trained fields. The names exported here are those of the model file."""

from voxelfield.export.model_file import ModelFileError, Rounding, save_model

__all__ = ["ModelFileError", "Rounding", "save_model"]
