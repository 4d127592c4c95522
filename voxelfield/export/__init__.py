"""Taking a result away: the model file."""

from voxelfield.export.model_file import load_model, save_model

__all__ = ["load_model", "save_model"]
