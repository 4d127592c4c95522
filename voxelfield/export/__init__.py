"""Taking a result away: the model file."""

from voxelfield.export.model_file import Rounding, load_model, save_model

__all__ = ["Rounding", "load_model", "save_model"]
