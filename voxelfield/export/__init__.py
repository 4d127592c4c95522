"""Taking a result away: the model file."""

from voxelfield.export.model_file import ModelFileError, Rounding, save_model

__all__ = ["ModelFileError", "Rounding", "save_model"]
