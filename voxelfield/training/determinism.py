"""Runs that repeat themselves bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def reproducible(wanted: bool) -> Iterator[None]:
    """Has torch and voxelfield choose algorithms that give the same bits each time.

    Sets ``torch.use_deterministic_algorithms(True)`` within, for the whole process. On CUDA, sums over samples are then
    taken in a fixed order, which takes longer. cuBLAS reads its part of the wish from ``CUBLAS_WORKSPACE_CONFIG`` when
    it is first used, so this has to begin before that.

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
