"""Loading of training results from any of the formats in which they are saved."""

from __future__ import annotations

from pathlib import Path

import torch

from voxelfield.devices import choose_device
from voxelfield.export.model_file import ModelFileError, read_model
from voxelfield.training.state.checkpoint import checkpoints, contents_of
from voxelfield.training.state.run_directory import MODEL_FILE
from voxelfield.training.trained_model import TrainedModel, load_trained_model, restore_trained_model


def load(path: Path | str, device: torch.device | str = "auto") -> TrainedModel:
    """Loads the result of a run, for evaluation and rendering; the files of its scene are not needed.

    Args:
        path: A model file (``*.safetensors``), a checkpoint, or a run directory, from which the newest checkpoint is
            loaded, or the model file if there is no checkpoint.
        device: Device to load to, such as ``"cuda:1"``; ``"auto"`` is the GPU if there is one.

    Returns:
        The run.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged or of another kind, or its configuration is invalid; the message names it.
    """
    path = Path(path)
    device = choose_device(str(device))
    if path.is_dir() and not checkpoints(path) and (path / MODEL_FILE).is_file():
        path = path / MODEL_FILE
    return load_model(path, device) if path.suffix == ".safetensors" else load_trained_model(path, device)


def load_model(path: Path | str, device: torch.device | str) -> TrainedModel:
    """Loads a model file; the files of its scene are not needed.

    Args:
        path: A file written by :func:`voxelfield.export.save_model`.
        device: Device for field and occupancy, such as ``"cuda"``.

    Returns:
        The run. It renders as before, but features that were left out are zero, and empty cells are not distinguished.

    Raises:
        FileNotFoundError: There is no such file.
        ModelFileError: The file is truncated or damaged, not a voxelfield model, or from another version.
        ValueError: Its configuration is invalid.
    """
    path, device = Path(path), torch.device(device)
    parts = read_model(path, device)
    with contents_of(path, ModelFileError):
        return restore_trained_model(*parts, device)
