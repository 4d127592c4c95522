"""Bit-for-bit reproducible runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def reproducible(wanted: bool) -> Iterator[None]:
    """Makes torch and voxelfield choose deterministic algorithms.

    Sets ``torch.use_deterministic_algorithms(True)`` inside the block, for the whole process. On CUDA, sums over
    samples are then computed in a fixed order, which is slower. cuBLAS reads ``CUBLAS_WORKSPACE_CONFIG`` when it is
    first used, so the block must begin before that.

    Args:
        wanted: False changes nothing.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
