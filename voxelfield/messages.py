"""Helpers for the wording of messages."""

from __future__ import annotations

LONGEST_MESSAGE = 1000
"""Largest number of characters of a message, so that a very long path or number leaves the rest readable."""

_LONGEST = 120


def clipped(text: str, longest: int = _LONGEST) -> str:
    """Returns a text, with its middle left out if it is too long.

    Args:
        text: The text, such as a value from a user or a file.
        longest: Largest number of characters of the result.
    """
    if len(text) <= longest:
        return text
    kept = (longest - 3) // 2
    return f"{text[:kept]}...{text[-kept:]}"


def printable(name: str) -> str:
    r"""Returns the name of a file as text that any program can draw or encode.

    Python represents bytes of a name that the locale cannot decode, such as those of an umlaut in the C locale, by lone
    surrogates. They are decoded as UTF-8 here, or written as ``\xfc``.

    Args:
        name: A part of a path.
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
