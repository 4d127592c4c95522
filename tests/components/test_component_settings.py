"""Settings of components by themselves: their defaults, those that exclude each other, and what files record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from voxelfield.components import registry
from voxelfield.components.registry import ComponentSettings, check_settings, key, recorded


@dataclass(frozen=True)
class GlowSettings(ComponentSettings):
    name = "glow"
    weight: float = key("trainer.glow.weight", 0.0, off=0)
    stages: list[int] = key("trainer.glow.stages", factory=lambda: [1, 2], idle=True)


@dataclass(frozen=True)
class LevelSettings(ComponentSettings):
    name = "level"
    level: Literal["none", "one", 2] = key("trainer.level", "none", off="none")


@dataclass(frozen=True)
class AlwaysSettings(ComponentSettings):
    name = "always"
    excludes: ClassVar[Mapping[str, str]] = {"level": "which does the same"}


@dataclass(frozen=True)
class NeverSettings(ComponentSettings):
    name = "never"
    excludes: ClassVar[Mapping[str, str]] = {"always": "which does the opposite"}


@dataclass
class Glow:
    weight: float = 0.0
    stages: list[int] = field(default_factory=lambda: [1, 2])


@dataclass
class Trainer:
    glow: Glow = field(default_factory=Glow)
    level: Any = "none"
    steps: int = 10


@dataclass
class Run:
    trainer: Trainer = field(default_factory=Trainer)


@pytest.fixture
def components(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[ComponentSettings]]:
    """All components that there are, by name, all of other packages."""
    found: dict[str, type[ComponentSettings]] = {}
    monkeypatch.setattr(registry, "_own", {})
    monkeypatch.setattr(registry, "_foreign", found)
    return found


def test_a_default_that_a_function_returns_may_be_left_as_it_is() -> None:
    GlowSettings().check(Run())
    with pytest.raises(
        ValueError, match=r"trainer.glow.stages must be left at \[1, 2\] where trainer.glow.weight is 0, got \[3\]"
    ):
        GlowSettings(stages=[3]).check(Run())


def test_a_component_without_a_switch_may_exclude_others(components: dict[str, type[ComponentSettings]]) -> None:
    components |= {"always": AlwaysSettings, "level": LevelSettings}
    check_settings(Run())
    message = "trainer.level must be none with always=on, which does the same, got one"
    with pytest.raises(ValueError, match=message):
        check_settings(Run(Trainer(level="one")))
    components |= {"never": NeverSettings}
    with pytest.raises(ValueError, match="always must be off with never=on, which does the opposite, got on"):
        check_settings(Run())


def test_values_that_are_no_texts_are_named() -> None:
    assert LevelSettings.in_words(True) == ("trainer.level", "one or 2")
    assert AlwaysSettings.in_words(True) == ("always", "on")


def test_files_do_not_record_foreign_components_that_are_off(components: dict[str, type[ComponentSettings]]) -> None:
    glow, level = Glow(weight=1.0), {"level": "none", "steps": 10}
    assert recorded(Run()) == {"trainer": {"glow": {"weight": 0.0, "stages": [1, 2]}, **level}}
    components["glow"] = GlowSettings
    assert recorded(Run()) == {"trainer": level}
    assert recorded(Run(Trainer(glow))) == {"trainer": {"glow": {"weight": 1.0, "stages": [1, 2]}, **level}}
    components["level"] = LevelSettings
    assert recorded(Run()) == {"trainer": {"steps": 10}}
