"""How this process was started: alone, or with others by torchrun or SLURM's srun, as the environment says.

Importing this module does not import torch, so that commands without tensors start at once.
"""

from __future__ import annotations

import os

# Variables by which torchrun tells processes of each other.
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started() -> int:
    """Returns the number of processes that torchrun or SLURM's srun has started with this one, by their variables.

    Raises:
        ValueError: It is not a number, or variables without which the processes cannot find each other are missing.
    """
    if by_slurm():
        return variable("SLURM_STEP_NUM_TASKS", 1)
    size = variable("WORLD_SIZE", 1) if "WORLD_SIZE" in os.environ else 1
    missing = [name for name in _VARIABLES if name not in os.environ]
    if size > 1 and missing:
        raise ValueError(
            f"WORLD_SIZE, of the environment, must be 1 or unset without {' and '.join(missing)}, got {size}: start "
            "the processes by torchrun or srun, or set these too"
        )
    return size


def by_slurm() -> bool:
    """Returns whether the variables of SLURM's srun alone say how many processes there are.

    A batch script, which srun has not started, has the variables of its job, but not those of a step.
    """
    return not set(_VARIABLES) <= set(os.environ) and {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= set(os.environ)


def variable(name: str, low: int = 0, high: int = 2**31) -> int:
    """Returns the whole number in a variable of the environment; raises ValueError unless it is in a range."""
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise ValueError(f"{name}, of the environment, must be a whole number from {low} to {high}, got {text!r}")
    return int(text)
