"""Numeric types of settings, with their ranges."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from voxelfield.config.parsing import Range

Count: TypeAlias = Annotated[int, Range(1)]
Natural: TypeAlias = Annotated[int, Range(0)]
Resolution: TypeAlias = Annotated[int, Range(2)]
Positive: TypeAlias = Annotated[float, Range(0, low_open=True)]
NotNegative: TypeAlias = Annotated[float, Range(0)]
BelowOne: TypeAlias = Annotated[float, Range(0, 1, high_open=True)]
