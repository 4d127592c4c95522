"""Prints the section of CHANGELOG.md about a version, as the notes of its release.

Usage: python packaging/release_notes.py 0.1.0
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def declared_version(pyproject: str) -> str:
    """Returns the version that the text of pyproject.toml declares.

    Raises:
        ValueError: It declares none.
    """
    found = re.search(r'^version = "([^"]+)"$', pyproject, re.MULTILINE)
    if found is None:
        raise ValueError('pyproject.toml must have a line such as version = "0.1.0", got none')
    return found[1]


def release_notes(changelog: str, version: str) -> str:
    """Returns the section of a version: the text between its heading, ``## 0.1.0``, and the next one of that level.

    Args:
        changelog: The text of CHANGELOG.md.
        version: Such as ``"0.1.0"``. The heading may go on after it, for example with a date.

    Raises:
        ValueError: There is no such section, or nothing in it.
    """
    _, *sections = re.split(r"^## +(.+)$", changelog, flags=re.MULTILINE)
    titles, texts = sections[::2], sections[1::2]
    for title, text in zip(titles, texts, strict=True):
        if title.split()[0] == version:
            if not text.strip():
                raise ValueError(f'CHANGELOG.md must describe version {version}, got an empty section "## {title}"')
            return text.strip() + "\n"
    known = ", ".join(titles) or "none"
    raise ValueError(f'CHANGELOG.md must have a section "## {version}", got only: {known}')


def main(project: Path = PROJECT) -> None:
    """Prints the notes of the version on the command line, which must be the one that pyproject.toml declares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("version", help="the version to be released, such as 0.1.0")
    version = parser.parse_args().version
    try:
        declared = declared_version((project / "pyproject.toml").read_text(encoding="utf-8"))
        if version != declared:
            raise ValueError(f"version must be that of pyproject.toml, {declared}, got {version}")
        notes = release_notes((project / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(notes, end="")


if __name__ == "__main__":
    main()
