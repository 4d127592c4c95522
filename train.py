"""Fits a voxel-grid radiance field to a scene: ``python train.py scene=lego``; see README.md and ``configs/``."""

import sys

from voxelfield.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
