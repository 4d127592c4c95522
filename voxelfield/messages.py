"""Helpers for the wording of messages."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

LONGEST_MESSAGE = 1000
"""Largest number of characters of a message, so that a very long path or number leaves the rest readable."""

_LONGEST = 120


def clipped(text: str, longest: int = _LONGEST) -> str:
    """Returns a text, such as a value from a user or a file, with its middle left out if it is too long."""
    if len(text) <= longest:
        return text
    half = (longest - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def reason_of(error: Exception) -> str:
    """Returns the message of an error as one line of at most 200 characters; its type if it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def error_in_words(error: BaseException) -> str:
    """Returns the type and the message of an error of code or data from elsewhere, in one line that is not too long."""
    try:
        text = str(error)
    except Exception as failure:  # of a class from elsewhere
        text = f"its text cannot be shown, because of {type(failure).__name__}"
    words = " ".join(f"{type(error).__name__}: {text}".split())
    return clipped(one_line(words.removesuffix(":")), 300)


def printable(name: str) -> str:
    r"""Returns the name of a file as text that any program can draw or encode.

    Python represents bytes of a name that the locale cannot decode, such as an umlaut in the C locale, by lone
    surrogates. They are decoded as UTF-8 here, or written as ``\xfc``.
    """
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def in_shell(path: Path) -> str:
    """Returns a path as a command in the current folder names it."""
    whole, here = Path(path).resolve(), Path.cwd()
    return shlex.quote(str(whole.relative_to(here) if whole.is_relative_to(here) else path))


def one_line(text: str) -> str:
    r"""Returns a text with characters that are not printable written as escapes, such as ``\n`` and ``\x1b``.

    So a message with a file's name can neither forge lines nor move a cursor.
    """
    with contextlib.suppress(UnicodeEncodeError):  # half of a pair that JSON may contain, and no file system
        text = printable(text)
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
