"""``python -m voxelfield`` is the command ``voxelfield``."""

import sys

from voxelfield.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
