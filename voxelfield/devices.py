"""Choosing a device by name."""

from __future__ import annotations

import re

import torch

DEVICES = r"auto|cpu|cuda(:\d{1,2})?"
"""Regular expression of what :func:`choose_device` takes."""

DEVICES_IN_WORDS = "auto, cpu, cuda or cuda:<index>"
"""The same for messages."""


def choose_device(wish: str) -> torch.device:
    """Returns the device for ``auto`` (CUDA if there is one), or the one named.

    Raises:
        ValueError: It names no device that kernels exist for, or a CUDA device that is not there.
    """
    if wish == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(DEVICES, wish) is None:
        raise ValueError(f"device must be {DEVICES_IN_WORDS}, got {wish!r}")
    device = torch.device(wish)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu where torch {torch.__version__} finds no CUDA device, got {wish!r}")
    if device.index is not None and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(
            f"device must be cuda:0 to cuda:{count - 1}, as torch finds {count} CUDA devices, got {wish!r}"
        )
    return device
