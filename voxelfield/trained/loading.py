"""Loading of training results from any of the formats in which they are saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from voxelfield.components.refinement import RefinedCameras
from voxelfield.devices import choose_device
from voxelfield.hub import fetch
from voxelfield.run_directory import MODEL_FILE, checkpoints
from voxelfield.trained.checkpoint_file import CheckpointError, contents_of, load_resolved
from voxelfield.trained.model_file import ModelFileError, read_model_file
from voxelfield.trained.trained_model import TrainedModel, restore_trained_model

# Entries of a checkpoint that rendering does not need.
_OF_TRAINING_ONLY = ("optimizer", "average", "data", "rng", "cuda_rng")


def load(path: Path | str, device: torch.device | str = "auto") -> TrainedModel:
    """Loads the result of a run, for evaluation and rendering; the files of its scene are not needed.

    Args:
        path: A model file (``*.safetensors``), a checkpoint, or a run directory, from which the newest checkpoint is
            loaded, or the model file if there is no checkpoint. ``hf://USER/NAME``, or ``hf://USER/NAME@REVISION``, is
            the model file of a repository of the Hugging Face Hub (:func:`voxelfield.hub.fetch`, with its errors).
        device: Device to load to, such as ``"cuda:1"``; ``"auto"`` is the GPU if there is one.

    Returns:
        The run. A model file renders as before, but features that were left out are zero, and empty cells are not
        distinguished.

    Raises:
        FileNotFoundError: There is no such file.
        ModelFileError: A model file is truncated or damaged, not a voxelfield model, or from another version.
        ValueError: The file is damaged or of another kind, or its configuration is invalid; the message names it.
    """
    path = fetch(path)
    device = choose_device(str(device))
    if path.is_dir() and not checkpoints(path) and (path / MODEL_FILE).is_file():
        path = path / MODEL_FILE
    error: type[ValueError] = CheckpointError
    if path.suffix == ".safetensors":
        error, saved = ModelFileError, read_model_file(path, device)
    else:
        path, saved = load_resolved(path, device, _OF_TRAINING_ONLY)
    with contents_of(path, error):
        trained = restore_trained_model(saved["config"], saved["model"], saved["step"], device)
        cameras, tones, exposures = saved.get("cameras"), saved.get("tones"), saved.get("exposure")
        # A user's component may have one of these names.
        cameras = cameras if trained.config.camera.refines else None
        tones = tones if trained.trainer.vignetting or trained.trainer.response else None
        exposures = exposures if exposures and trained.trainer.exposure != "none" and exposures["applied"] else None
        cameras = cameras and RefinedCameras.from_state(cameras)
        return replace(trained, cameras=cameras, tones=tones or None, exposures=exposures)
