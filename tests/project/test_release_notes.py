"""Release notes are the section of CHANGELOG.md about the version that pyproject.toml declares."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SCRIPT = PROJECT / "packaging" / "release_notes.py"
CHANGELOG = """\
# Changelog

## 0.2.0 (2026-12-01)

### Added

- A grid.

## 0.1.0

- First.
"""


@pytest.fixture(scope="module")
def release_notes():
    return runpy.run_path(str(SCRIPT))["release_notes"]


def test_the_changelog_begins_with_the_declared_version():
    notes = subprocess.run([sys.executable, SCRIPT, "0.1.0"], capture_output=True, text=True, check=True).stdout
    text = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.match(r"# Changelog\n\n## 0\.1\.0\b.*\n\n", text)
    assert notes in text


def test_the_citation_is_of_the_declared_version_and_licence():
    cited = dict(re.findall(r"^(version|license): (.*)$", (PROJECT / "CITATION.cff").read_text(), re.MULTILINE))
    project = (PROJECT / "pyproject.toml").read_text()
    assert all(f'\n{name} = "{value}"\n' in project for name, value in cited.items())
    assert cited.keys() == {"version", "license"}


@pytest.mark.parametrize(("version", "notes"), [("0.2.0", "### Added\n\n- A grid.\n"), ("0.1.0", "- First.\n")])
def test_notes_are_one_section(release_notes, version, notes):
    assert release_notes(CHANGELOG, version) == notes


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        (CHANGELOG, r'must have a section "## 0.2", got only: 0.2.0 \(2026-12-01\), 0.1.0$'),
        ("# Changelog\n", "got only: none$"),
        ("## 0.2\n\n## 0.1.0\n\n- First.\n", 'must describe version 0.2, got an empty section "## 0.2"$'),
    ],
)
def test_missing_notes_are_named(release_notes, changelog, message):
    with pytest.raises(ValueError, match=message):
        release_notes(changelog, "0.2")


@pytest.mark.parametrize(
    ("version", "printed", "error"),
    [
        ("0.2.0", "### Added\n\n- A grid.\n", ""),
        ("0.1.0", "", "error: version must be that of pyproject.toml, 0.2.0, got 0.1.0\n"),
    ],
)
def test_the_version_is_that_of_the_project(tmp_path, version, printed, error):
    script = tmp_path / "packaging" / SCRIPT.name
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "voxelfield"\nversion = "0.2.0"\n')
    done = subprocess.run([sys.executable, script, version], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (printed, error, int(bool(error)))
