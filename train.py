"""Fits a voxel-grid radiance field to a scene: ``python train.py scene=lego``; see README.md and ``configs/``."""

import sys

from voxelfield.cli.command import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
