"""Names and values with line breaks and escapes stay within one line, in records and in messages."""

from __future__ import annotations

import logging

import pytest
from short_runs import run

from voxelfield.cli import machine
from voxelfield.cli.command import main, one_line_records
from voxelfield.messages import error_in_words, one_line

FORGED = "lego\n[2026-01-01 00:00:00,000][train][ERROR] - all is lost\x1b[2J"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, Größe, 東京, C:\\new", "plain, Größe, 東京, C:\\new"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[31mred\x07\x9b2J", "\\x1b[31mred\\x07\\x9b2J"),
        ("\N{RIGHT-TO-LEFT OVERRIDE}gnp\N{LINE SEPARATOR}", "\\u202egnp\\u2028"),
        ("\udcff of a name, \ud800 of JSON", "\\udcff of a name, \\ud800 of JSON"),
        ("\udcff of a name", "\\xff of a name"),
    ],
)
def test_what_is_not_printable_is_escaped(text, expected):
    assert one_line(text) == expected
    assert one_line(text).isprintable()


def test_a_record_is_one_line_whatever_it_names(caplog):
    caplog.set_level("INFO")
    with one_line_records():
        logging.getLogger("voxelfield.training").info("read %s of %d", FORGED, 3)
        logging.getLogger("other").info("read %s", "a\nb")
    logging.getLogger("voxelfield.training").info("read %s", "a\nb")
    assert caplog.messages == [
        "read lego\\n[2026-01-01 00:00:00,000][train][ERROR] - all is lost\\x1b[2J of 3",
        "read a\nb",
        "read a\nb",
    ]


def test_an_error_of_a_verb_is_one_line(monkeypatch, caplog):
    def fail(options: object) -> None:
        raise ValueError(f"scene must exist, got {FORGED}")

    monkeypatch.setattr(machine, "run_doctor", fail)
    assert main(["doctor"]) == 2
    (message,) = caplog.messages
    assert message.isprintable()


def test_a_run_whose_scene_has_such_a_name_logs_no_forged_record(tmp_path):
    folder = tmp_path / FORGED
    folder.mkdir()
    for arguments in ((f"scene={folder}",), ("scene=lego", f"scene.name='{FORGED}'")):
        status, text = run(*arguments, f"hydra.run.dir={tmp_path / 'run'}", "logger=none", "device=cpu")
        assert status == 2, text
        assert "\x1b" not in text
        assert not [line for line in text.splitlines() if line.startswith("[2026-01-01")]


def test_the_words_of_an_error_from_elsewhere_cannot_control_a_terminal():
    error = type("\n\x1b[31mRed", (BaseException,), {})("\x1b[2J\ngone")
    assert error_in_words(error) == r"\x1b[31mRed: \x1b[2J gone"
    mute = type("Mute", (Exception,), {"__str__": lambda self: 1 // 0})()
    assert error_in_words(mute) == "Mute: its text cannot be shown, because of ZeroDivisionError"
