"""Hook of mkdocs: the pages of all settings and of all commands, made from what ``--help`` prints at each build."""

from __future__ import annotations

import argparse
import html
import importlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

# mkdocs does not look for modules in its working directory, and an installed copy may be older.
sys.path.insert(0, str(Path(__file__).parents[2]))
from voxelfield.cli.command import VERBS
from voxelfield.cli.train_help import described, help_text
from voxelfield.models.model_config import known_models
from voxelfield.settings import preset

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_SETTINGS = """# All settings

Each setting of `voxelfield train KEY=VALUE`, with its default, which a preset such as `trainer=fast` may change;
`voxelfield train OVERRIDES --help` prints the same lines with the values of that command. [Training](training.md) says
which settings to try. The defaults of a machine without a GPU are given where they differ.
"""

_COMMANDS = """# Commands

RUN is a run directory, a checkpoint or a model file. `voxelfield VERB --help` prints what this page says.
"""


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages."""
    from mkdocs.structure.files import File

    for name, page in (("settings.md", settings_page()), ("commands.md", commands_page())):
        files.append(File.generated(config, name, content=page))


def settings_page() -> str:
    """Returns a page, in Markdown, with a line for each key of the configuration."""
    on_gpu, on_cpu = (preset(name=name) for name in ("train", "train_cpu"))
    elsewhere = {key: value for key, value, _ in described(on_cpu)}
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, value, meaning in described(on_gpu):
        if not key.startswith("model."):  # its keys depend on its kind
            group = key.rpartition(".")[0] or "Of the whole run"
            groups.setdefault(group, []).append((_assigned(key, value, elsewhere[key]), meaning))
    for name in known_models():
        default = {on_gpu.model.kind: ", the default", on_cpu.model.kind: ", the default without a GPU"}.get(name, "")
        model = preset(f"model={name}", name="train").model
        lines = [(_assigned(key, value, value), meaning) for key, value, meaning in described(model, "model.")]
        groups[f"model={name}{default}"] = lines
    sections = (f"## {group}\n\n{_list(lines)}" for group, lines in groups.items())
    return "\n".join([_SETTINGS, *sections])


def commands_page() -> str:
    """Returns a page, in Markdown, with the arguments of each verb of the command line."""
    return "\n".join([_COMMANDS, *(f"## voxelfield {verb}\n\n{_command(verb)}" for verb in VERBS)])


def _command(verb: str) -> str:
    if verb == "train":  # whose command line is Hydra's
        text = help_text(preset(name="train")).partition("Settings, with")[0]
        return f"The page of all settings lists what KEY may be.\n\n```text\n{text.rstrip()}\n```\n"
    commands = importlib.import_module(f"voxelfield.cli.{VERBS[verb][0]}")
    parser = argparse.ArgumentParser(f"voxelfield {verb}", description=getattr(commands, f"run_{verb}").__doc__)
    getattr(commands, f"add_{verb}_arguments")(parser)
    rows = (
        (_argument(each), (each.help or "") % {**vars(each), "prog": parser.prog})
        for each in parser._actions
        if each.dest != "help"
    )
    return f"{_escaped(parser.description or '')}\n\n{_list(rows)}"


def _argument(action: argparse.Action) -> str:
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    value = "" if action.nargs == 0 else str(action.metavar or choices)
    return f"`{' '.join(part for part in (', '.join(action.option_strings), value) if part)}`"


def _assigned(key: str, value: Any, on_cpu: Any) -> str:
    other = "" if value == on_cpu else f", without a GPU `{_written(on_cpu)}`"
    return f"`{key}={_written(value)}`{other}"


def _written(value: Any) -> str:
    """Returns a value as an override has it."""
    return value if isinstance(value, str) else json.dumps(value, default=asdict).replace('"', "")


def _list(entries: Iterable[tuple[str, str]]) -> str:
    """Returns a list of names and their meanings; in a table, narrow screens would break the names."""
    return "".join(f"- {name}<br>{_escaped(meaning)}\n" for name, meaning in entries)


def _escaped(text: str) -> str:
    """Returns a plain text as Markdown has it."""
    return html.escape(" ".join(text.split()), quote=False).replace("*", r"\*")
