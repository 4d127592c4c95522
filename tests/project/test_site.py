"""The pages of the site that quote the package agree with it. CI builds the site itself (mkdocs build --strict)."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import voxelfield
from voxelfield.cli.command import VERBS, main
from voxelfield.components.logger import flattened
from voxelfield.settings import compose

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "voxelfield"


def messages() -> Iterator[str]:
    """Yields every string of the package and of setup.py, with … for what an f-string or a % sign puts in."""
    for path in (*PACKAGE.rglob("*.py"), ROOT / "setup.py"):
        inside: set[int] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                inside |= {id(part) for part in node.values}
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                yield re.sub(r"%(\.\d)?[sdf]", "…", node.value)


def quoted() -> list[str]:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^### `(.+)`$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> str:
    return "\n".join(messages())


@pytest.mark.parametrize("message", quoted())
def test_a_message_that_troubleshooting_explains_is_one_that_is_printed(message: str, said: str) -> None:
    # A value may stand for several words, or for nothing.
    pattern = ".*".join(map(re.escape, message.split("…")))
    assert re.search(pattern, said)


def test_troubleshooting_explains_messages() -> None:
    assert len(quoted()) > 10


@pytest.mark.parametrize("module", [voxelfield, voxelfield.ops], ids=["voxelfield", "ops"])
def test_every_public_name_has_its_place_in_the_api(module: object) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    assert set(module.__all__) - shown == {"ops", "__version__"} & set(module.__all__)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Returns the names of the hook that makes the pages of settings and commands."""
    return runpy.run_path(str(ROOT / "docs" / "site" / "reference.py"))


def test_every_setting_is_on_the_page_of_settings(reference: dict[str, Any]) -> None:
    page = reference["settings_page"]()
    shown = set(re.findall(r"^- `([\w.]+)=", page, re.MULTILINE))
    composed = [compose(f"model={name}", name="train") for name in ("pyramid", "sh", "dense")]
    assert shown == {key for config in composed for key in flattened(OmegaConf.to_container(config))}
    assert "- `trainer.steps=5000`, without a GPU `1350`<br>Number of optimizer steps\n" in page
    assert not re.search("<br>$", page, re.MULTILINE), "a setting has no meaning"


def test_every_verb_is_on_the_page_of_commands_with_its_options(
    reference: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    sections = dict(re.findall(r"^## voxelfield (\w+)\n(.*?)(?=^## |\Z)", reference["commands_page"](), re.M | re.S))
    assert list(sections) == list(VERBS)
    for verb, section in sections.items():
        if verb != "train":
            with pytest.raises(SystemExit, match="0"):
                main([verb, "--help"])
            options = re.findall(r"^  (?:-\w[^-]*, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
            assert [option for option in options if option not in section] == ["--help"], verb
    assert "model=     dense, pyramid, sh" in sections["train"]
    assert "Settings, with" not in sections["train"]
