"""JSON files of scenes."""

from __future__ import annotations

import json
from typing import Any


def json_object(name: str, content: str | bytes) -> dict[str, Any]:
    """Returns the JSON object that a file consists of, in UTF-8, UTF-16 or UTF-32.

    Args:
        name: Name of the file, for messages.
        content: Content of the file.

    Raises:
        ValueError: It is not a JSON object.
    """
    try:
        found = json.loads(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: must be UTF-8 text, or UTF-16 with a byte order mark ({error})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name}: must hold a JSON object, got a {type(found).__name__}")
    return found
