"""Export of trained fields. This package itself exports the names of the model file."""

from voxelfield.trained.model_file import ModelFileError, save_model

__all__ = ["ModelFileError", "save_model"]
