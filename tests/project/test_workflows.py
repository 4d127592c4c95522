"""The workflows of GitHub: what cannot be seen by running them here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_are_given_job_by_job(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {}
    assert all({"permissions", "timeout-minutes"} <= job.keys() for job in workflow["jobs"].values())
    uses = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert uses
    assert [action for action in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", action)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_name_what_there_is(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    named = re.findall(r"(?<![\w/$\"])((?:\.ci|packaging|tests)/[\w./]+)", "\n".join(commands))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_ci_runs_what_readmes_command_leaves_out():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (left_out,) = re.findall(r"^python -m pytest (.*)$", script, re.MULTILINE)
    assert shlex.split(left_out) == ["-q", "-n", "2", "-m", "slow or sweep", "--slow", "--sweep", "--share", "$share"]
