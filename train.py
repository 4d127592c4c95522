"""Fits a voxel-grid radiance field to a scene: ``python train.py scene=lego``; see README.md and ``configs/``."""

import gc
import sys

if __name__ == "__main__":
    # A million objects come with torch, and all of them stay: to look for garbage among them, again and again, would
    # take a tenth of the time until training begins.
    gc.disable()
    from voxelfield.cli.train import main

    gc.freeze()
    gc.enable()
    sys.exit(main())
