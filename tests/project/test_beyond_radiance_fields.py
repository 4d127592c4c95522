"""The programs of docs/beyond_radiance_fields.md: each runs on its own, and draws the picture that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"save\(\"(\w+\.webp)\"")
LINES, BYTES = 60, 60_000


def programs() -> dict[str, str]:
    """Returns the programs by the name of their picture."""
    blocks = BLOCK.findall((DOCS / "beyond_radiance_fields.md").read_text(encoding="utf-8"))
    return {PICTURE.findall(block)[0]: block for block in blocks}


@pytest.mark.parametrize("picture", programs())
def test_a_program_draws_its_picture(picture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    exec(compile(programs()[picture], picture, "exec", dont_inherit=True), {})
    shown, drawn = (np.asarray(image.open(path).convert("RGB"), float) for path in (DOCS / "images" / picture, picture))
    # Sums are rounded differently on other machines, which a training amplifies.
    assert shown.shape == drawn.shape
    assert np.abs(shown - drawn).mean() < 3


def test_programs_and_pictures_are_small() -> None:
    text = (DOCS / "beyond_radiance_fields.md").read_text(encoding="utf-8")
    assert len(programs()) == 6
    for picture, block in programs().items():
        assert len(block.splitlines()) <= LINES
        assert f"(images/{picture})" in text
        assert (DOCS / "images" / picture).stat().st_size < BYTES
