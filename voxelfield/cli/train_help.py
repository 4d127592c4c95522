"""The text of ``voxelfield train --help``: examples, choices, and one line for each setting."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from voxelfield.components.registry import keys_of, registered
from voxelfield.installed import config_folder
from voxelfield.settings import RunConfig

_TEXT = """usage: voxelfield train [SCENE] [KEY=VALUE ...]

  voxelfield train                                  the bundled scene
  voxelfield train FOLDER                           photographs with poses: COLMAP, nerfstudio, Blender and others
  voxelfield train scene=lego data.download=true    a public scene
  voxelfield train FOLDER trainer=best              another preset
  voxelfield train FOLDER model=sh                  another kind of field
  voxelfield train FOLDER trainer.image_size=800    another value of a setting
  voxelfield train FOLDER camera=refine             poses that are learned too
  voxelfield train FOLDER logger.viewer=true        to watch it in a browser
  voxelfield train resume=RUN trainer.steps=9000    to go on, with the settings of RUN
  voxelfield train -m scene=FOLDER seed=0,1,2       a sweep: three runs

Files of settings:

{choices}

Settings, with the values that they have on this command line without --help:

{settings}

The options are Hydra's: --cfg job prints the settings in YAML, and --hydra-help lists the others."""

# An entry of the section "Attributes" of a docstring, and markup in it.
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_MARKUP = re.compile(r":\w+:`[~.\w]*?(\w+)`|`+([^`]*)`+")

# Columns of a key with its value, and most characters of a value.
_KEY, _VALUE = 38, 12


def help_text(config: RunConfig) -> str:
    """Returns the text, with lines of settings that are as wide as the terminal."""
    groups = ("scene", "model", "trainer", "optimizer", "camera", "logger")
    files = ((group, sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))) for group in groups)
    room = max(20, shutil.get_terminal_size((200, 24)).columns - _KEY - 4)
    lines = []
    for key, value, meaning in described(config):
        text = value if isinstance(value, str) else json.dumps(value, default=asdict)
        shown = f"{key}={text if len(text) <= _VALUE else '...'}"
        lines.append(f"  {shown:{_KEY}}  {textwrap.shorten(meaning, room, placeholder=' ...')}")
    choices = "\n".join(f"  {group + '=':11}{', '.join(names)}" for group, names in files)
    return _TEXT.format(choices=choices, settings="\n".join(lines))


def described(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields the key, the value and the meaning, in a sentence, of each of the settings of a run."""
    stated = {key.path: (kind, name) for kind in registered() for name, key in keys_of(kind).items() if key.mounted}
    for each in fields(settings):
        key, value = prefix + each.name, getattr(settings, each.name)
        if is_dataclass(value):
            yield from described(value, f"{key}.")
        else:
            yield key, value, _meaning(*stated.get(key, (type(settings), each.name)))


def _meaning(settings: type, name: str) -> str:
    """Returns the first sentence about a field in the docstring of its dataclass, or of a base class; empty if none."""
    sections = [inspect.cleandoc(each.__doc__ or "").partition("\nAttributes:\n")[2] for each in settings.__mro__]
    entries = (dict(_ENTRY.findall(section)) for section in sections)
    text = next((found[name] for found in entries if name in found), "")
    plain = _MARKUP.sub(lambda found: found[1] or found[2], " ".join(text.split()))
    return re.split(r"\.(?: (?=[A-Z])|$)", plain)[0]
