"""Fits a voxel-grid radiance field to a scene: ``python train.py scene=lego``; see README.md and ``configs/``."""

import sys

from voxelfield.cli.command import run_verb

if __name__ == "__main__":
    sys.exit(run_verb("train", None))
