"""Choosing a device by name."""

from __future__ import annotations

import torch


def choose_device(wish: str) -> torch.device:
    """Returns the device for ``auto`` (CUDA if there is one), or the one named.

    Raises:
        ValueError: It is a CUDA device where there is none.
    """
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wish)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={wish}, but torch {torch.__version__} finds no CUDA device; use device=cpu")
    return device
