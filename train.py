"""Fits a voxel-grid radiance field to a scene: ``python train.py scene=lego``; see README.md and ``configs/``."""

import gc
import sys

if __name__ == "__main__":
    # Importing torch creates about a million objects that are never freed. Scanning them in each garbage collection
    # would take a tenth of the start-up time.
    gc.disable()
    from voxelfield.cli.train import main

    gc.freeze()
    gc.enable()
    sys.exit(main())
