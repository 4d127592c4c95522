"""Values that a browser sends for the controls of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class RefusedMessageError(ValueError):
    """A message that no browser sends by means of the page."""


def number(name: str, value: object, low: float, high: float) -> float:
    """Returns a number moved into a range.

    Args:
        name: What a message calls it.
        value: What a client has sent.
        low: Lower end.
        high: Upper end.

    Raises:
        RefusedMessageError: It is not a number, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RefusedMessageError(f"{name} must be a finite number, got {_shown(value)}")
    return min(max(float(value), low), high)


def whole_number(name: str, value: object, low: int, high: int) -> int:
    """As :func:`number`, rounded to a whole number."""
    return round(number(name, value, low, high))


def numbers(name: str, value: object, low: Sequence[float], high: Sequence[float]) -> list[float]:
    """Returns numbers moved into a range each; arguments and errors as for :func:`number`, and of as many numbers."""
    if not isinstance(value, list | tuple) or len(value) != len(low):
        raise RefusedMessageError(f"{name} must be {len(low)} numbers, got {_shown(value)}")
    return [number(name, *each) for each in zip(value, low, high, strict=True)]


def text(name: str, value: object, longest: int = 255) -> str:
    """Returns a text.

    Raises:
        RefusedMessageError: It is none, or longer than a number of characters.
    """
    if not isinstance(value, str) or len(value) > longest:
        raise RefusedMessageError(f"{name} must be a text of at most {longest} characters, got {_shown(value)}")
    return value


def control_value(control: Any, value: object) -> Any:
    """Returns the value that a control of the page takes on: what a client has sent, moved into the control's range.

    Args:
        control: viser's handle.
        value: What a client has sent.

    Raises:
        RefusedMessageError: It is of another type than the control's, or none of its options.
    """
    present, name = control.value, f"a value of {type(control).__name__}"
    options = getattr(control, "options", None)
    if options is not None:
        if not isinstance(value, str) or value not in options:
            raise RefusedMessageError(f"{name} must be one of its options, got {_shown(value)}")
        return value
    if isinstance(present, bool):
        if not isinstance(value, bool):
            raise RefusedMessageError(f"{name} must be true or false, got {_shown(value)}")
        return value
    if isinstance(present, int):
        return whole_number(name, value, control.min, control.max)
    if isinstance(present, float):
        return number(name, value, control.min, control.max)
    if isinstance(present, tuple):
        ends = [end if isinstance(end, tuple) else (end,) * len(present) for end in (control.min, control.max)]
        return numbers(name, value, *ends)
    raise RefusedMessageError(f"{name} cannot be set by a browser")


def _shown(value: object) -> str:
    shown = repr(value) if isinstance(value, bool | int | float | None) else type(value).__name__
    return shown[:40]
