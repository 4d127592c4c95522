"""The scalars that a run recorded during training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from voxelfield.files import open_regular
from voxelfield.training.logs import EVENTS

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Steps, rising, with a value each."""

History: TypeAlias = Mapping[str, Curve]
"""Curves by tag, such as ``train/psnr``."""


def read_history(directory: Path) -> dict[str, Curve]:
    """Reads the scalars that TensorBoard shows of a run.

    Args:
        directory: Run directory. Records of an interrupted run after the step from which it was resumed are left out.

    Returns:
        Curves by tag, none if nothing was recorded (``logger=none``).

    Raises:
        ValueError: One of TensorBoard's files is not a file, but a named pipe, for example.
    """
    files = list(directory.glob(EVENTS))
    if not files:
        return {}
    for file in files:
        open_regular(file).close()  # TensorBoard would wait for a named pipe
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 loads all items of a kind, 1 only one.
    limits = {"scalars": 0, "tensors": 1, "images": 1, "histograms": 1, "compressedHistograms": 1, "audio": 1}
    # Below errors, it warns about steps that an interrupted run logged twice and reports the end of the last file.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(directory), size_guidance=limits).Reload()
    return {
        tag: tuple((event.step, float(event.value)) for event in events.Scalars(tag))
        for tag in events.Tags()["scalars"]
    }
