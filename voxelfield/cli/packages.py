"""The packages that training needs; imports nothing, so that a missing one can be named before anything is imported."""

from __future__ import annotations

TRAINING_PACKAGES = {
    "numpy": "numpy",
    "hydra": "hydra-core",
    "omegaconf": "hydra-core",
    "yaml": "pyyaml",
    "tensorboard": "tensorboard",
    "PIL": "pillow",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "safetensors": "safetensors",
    "av": "av",
    "pooch": "pooch",
    "tqdm": "tqdm",
}
"""Packages that ``pip install "voxelfield[train]"`` installs: import names -> distributions."""

HOW_TO_INSTALL = 'pip install "voxelfield[train]"'
"""The command that installs them."""
