"""Fits a voxel-grid radiance field to a scene: ``python train.py scene=lego``; see README.md and ``configs/``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from omegaconf import DictConfig

from voxelfield.download import DownloadError
from voxelfield.training.run import run
from voxelfield.training.trainer import EmptyFieldError

logger = logging.getLogger("train")

# Without a GPU the same command runs a preset that a CPU finishes in minutes.
CONFIG = "train" if torch.cuda.is_available() else "train_cpu"


@hydra.main(version_base="1.3", config_path="configs", config_name=CONFIG)
def main(config: DictConfig) -> float | None:
    """Runs what Hydra composed; returns the test PSNR, which Hydra's sweepers can optimise."""
    choices = HydraConfig.get().runtime.choices
    logger.info("scene=%s model=%s trainer=%s", choices["scene"], choices["model"], choices["trainer"])
    if CONFIG == "train_cpu":
        logger.info("no CUDA device: model=mlp and trainer=cpu are the defaults (smaller images, one smaller grid)")
    try:
        metrics = run(config, Path(HydraConfig.get().runtime.output_dir), Path(get_original_cwd()))
    except (ValueError, FileNotFoundError, DownloadError) as error:
        logger.error("%s", error)
        sys.exit(2)
    except (EmptyFieldError, FloatingPointError) as error:
        logger.error("%s", error)
        sys.exit(1)
    if metrics is None:
        sys.exit(130)
    psnr: float = metrics["psnr"]
    return psnr


if __name__ == "__main__":
    main()
