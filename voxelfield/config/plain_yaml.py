"""YAML that may come from a stranger, read as plain text: nothing in it is resolved, expanded or constructed."""

from __future__ import annotations

from pathlib import Path

import yaml

from voxelfield.files import read_regular
from voxelfield.messages import clipped

_LARGEST = 1 << 20


def read_texts(path: Path) -> list[str]:
    """Reads a YAML list of texts or numbers, such as Hydra's record of the overrides of a run.

    Args:
        path: The file, of at most 1 MiB.

    Returns:
        The items as text. Interpolations such as ``${oc.env:HOME}`` are text like any other.

    Raises:
        ValueError: The file holds something else.
        OSError: The file cannot be read.
    """
    content = read_regular(path)
    if len(content) > _LARGEST:
        raise ValueError(f"{path} must be a file of at most {_LARGEST} bytes, got {len(content)}")
    try:
        # Only the first level is looked at. Composing stops short of constructing objects, which would follow aliases:
        # a few lines of them describe more items than fit in memory.
        root = yaml.compose(content, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = clipped(" ".join(str(error).split()))
        raise ValueError(f"{path} must be a list in YAML, got a file that is not valid ({reason})") from error
    if root is None:
        return []
    if not isinstance(root, yaml.SequenceNode) or not all(isinstance(item, yaml.ScalarNode) for item in root.value):
        raise ValueError(f"{path} must be a list of texts in YAML, got another structure")
    return [str(item.value) for item in root.value]
