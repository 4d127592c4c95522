"""Loading of training results from any of the formats in which they are saved."""

from __future__ import annotations

from pathlib import Path

import torch

from voxelfield.devices import choose_device
from voxelfield.export.model_file import load_model
from voxelfield.training.state.checkpoint import checkpoints
from voxelfield.training.state.run_directory import MODEL_FILE
from voxelfield.training.trained_model import TrainedModel, load_trained_model


def load(path: Path | str, device: torch.device | str = "auto") -> TrainedModel:
    """Loads the result of a run, for evaluation and rendering; the files of its scene are not needed.

    Args:
        path: A model file (``*.safetensors``), a checkpoint, or a run directory, from which the newest checkpoint is
            loaded, or the model file if there is no checkpoint.
        device: Device to load to, such as ``"cuda:1"``; ``"auto"`` is the GPU if there is one.

    Returns:
        The run. A model file renders as before, but features that were left out are zero, and empty cells are not
        distinguished.

    Raises:
        FileNotFoundError: There is no such file.
        ModelFileError: A model file is truncated or damaged, not a voxelfield model, or from another version.
        ValueError: The file is damaged or of another kind, or its configuration is invalid; the message names it.
    """
    path = Path(path)
    device = choose_device(str(device))
    if (path / "regions.json").is_file():
        raise ValueError(f"RUN must have one field, got one of several regions, which are no longer read: {path}")
    if path.is_dir() and not checkpoints(path) and (path / MODEL_FILE).is_file():
        path = path / MODEL_FILE
    return load_model(path, device) if path.suffix == ".safetensors" else load_trained_model(path, device)
