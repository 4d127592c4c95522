"""Words of messages."""

from __future__ import annotations

LONGEST_MESSAGE = 1000
"""Of characters, so that a path or a number that is longer than any screen leaves the words readable."""

_LONGEST = 120


def clipped(text: str, longest: int = _LONGEST) -> str:
    """Returns a text, its middle left out where it is long.

    Args:
        text: Such as a value that a user or a file gave.
        longest: Number of characters that it may have.
    """
    if len(text) <= longest:
        return text
    kept = (longest - 3) // 2
    return f"{text[:kept]}...{text[-kept:]}"
