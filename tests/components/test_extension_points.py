"""Components of other packages, one file each: on the command line, in Python, resumed, and refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import short_runs
import torch
from installed_package import install
from small_sessions import differences
from warm_python import ROOT

from voxelfield.trained.checkpoint_file import load_checkpoint

HEAD = """
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from voxelfield.components.registry import ComponentSettings, key
from voxelfield.config import NotNegative, Positive
from voxelfield.models import Component
"""

WEIGHT = """
@dataclass(frozen=True)
class BrightSettings(ComponentSettings):
    name = "bright"
    bright: NotNegative = key("trainer.loss.bright", 0.0, off=0)

    def build(self, training):
        return [Bright(self.bright)]


class Bright(Component):
    name = "bright"

    def __init__(self, weight):
        self.weight = weight

    def prepare(self, batch):
        batch.weigh(1 + self.weight * batch.rgba[:, :3].mean(dim=1))
"""

CORRECTION = """
@dataclass(frozen=True)
class GainSettings(ComponentSettings):
    name = "gain"
    after = ("environment",)
    excludes: ClassVar[Mapping[str, str]] = {"exposure": "which has gains too"}
    gain: bool = key("trainer.gain", False, off=False, fixed=True)
    gain_lr: Positive = key("optimizer.gain_lr", 0.01, idle=True)

    def build(self, training):
        return [Gain(len(training.scene.train), self.gain_lr, training.model.device)]


class Gain(Component):
    name = "gain"

    def __init__(self, images, lr, device):
        self.logs, self.lr = nn.Parameter(torch.zeros(images, 1, device=device)), lr

    def adjust(self, outputs, batch):
        outputs.rgb = outputs.rgb * batch.for_rays(self.logs.index_select(0, batch.images)).exp()

    def param_groups(self):
        return {"gain": ([self.logs], self.lr)}

    def state_dict(self):
        return {"logs": self.logs.detach()}

    def load_state_dict(self, state):
        self.logs.data.copy_(state["logs"])
"""

# Components with which no run could be started if they were not left out: the line that is changed, and the reason.
KEY = 'bright: NotNegative = key("trainer.loss.bright", 0.0, off=0)'
UNUSABLE = {
    "ours": ('bright: int = key("trainer.steps", 3)', "must have a key of its own, got trainer.steps"),
    "method": ('bright: int = key("trainer.scaled", 3)', "must have a key of its own, got trainer.scaled"),
    "twice": (f'{KEY}\n    other: int = key("trainer.loss.bright", 3)', "a key of its own, got trainer.loss.bright"),
    **{
        f"in_{group.replace('.', '_')}": (f'bright: int = key("{group}.foo", 3)', f"must not have keys below {group}")
        for group in ("trainer.render", "trainer.rates", "trainer.steps", "data", "scene", "warp", "model")
    },
    "dashed": ('bright: int = key("trainer.very-bright", 3)', "must have keys of identifiers, got trainer.very-bright"),
    "misread": ('bright: int = key("optimizer.nope")', "must read a key that exists, got optimizer.nope"),
    "untyped": ('bright: "Nowhere" = key("trainer.bright", 3)', "NameError: name 'Nowhere' is not defined"),
    "negative": ('bright: NotNegative = key("trainer.bright", -3.0)', "trainer.bright must be at least 0, got -3.0"),
    "second": (f"{KEY}\n\n\nclass OtherSettings(BrightSettings):\n    pass", "must have a key of its own"),
}

BACKGROUND = """
@dataclass(frozen=True)
class SkylightSettings(ComponentSettings):
    name = "skylight"
    weight: NotNegative = key("trainer.skylight.weight", 0.0, off=0)
    lr: Positive = key("trainer.skylight.lr", 0.05, idle=True)

    def build(self, training):
        return [Skylight(self, training.model.device)]


class Skylight(Component):
    name = "skylight"

    def __init__(self, settings, device):
        self.settings, self.color = settings, nn.Parameter(torch.full((3,), 0.5, device=device))

    def prepare(self, batch):
        batch.background = torch.lerp(batch.background, self.color, self.settings.weight)

    def param_groups(self):
        return {"skylight": ([self.color], self.settings.lr)}

    def state_dict(self):
        return {"color": self.color.detach()}

    def load_state_dict(self, state):
        self.color.data.copy_(state["color"])
"""

OPTIMIZER = """
from voxelfield.foundation.optimizers import EagerMethods


@dataclass(frozen=True)
class LionSettings(ComponentSettings):
    name = "lion"
    excludes: ClassVar[Mapping[str, str]] = {"matrices": "which updates them too"}
    lion: bool = key("optimizer.lion", False, off=False, fixed=True)

    def build(self, training):
        return [Lion()]


class Lion(Component):
    name = "lion"

    def network_optimizer(self, parameters, lr, betas, weight_decay):
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        return Signs(matrices, {"lr": lr, "momentum": betas[0]})


class Signs(EagerMethods):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
                    mean.lerp_(matrix.grad, 1 - group["momentum"])
                    matrix -= 0.1 * group["lr"] * mean.sign()
"""

PACKAGES = {
    "bright": (WEIGHT, ("trainer.loss.bright=0.5",)),
    "gain": (CORRECTION, ("trainer.gain=true", "optimizer.gain_lr=0.02")),
    "skylight": (BACKGROUND, ("trainer.skylight.weight=0.5",)),
    "lion": (OPTIMIZER, ("optimizer.lion=true", "optimizer.matrices=adamw")),
}
QUICK = (*short_runs.TINY, "device=cpu", "logger=none", "trainer.model_file=none")


def install_component(folder: Path, name: str, value: str, text: str | None = None) -> None:
    """Installs a package that declares components in one module, or a module that does not exist."""
    install(folder, name, {"voxelfield.components": {name: value}}, {} if text is None else {name: text})


def run(*command: str, package: Path, tree: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, because components are found when the settings are imported."""
    paths = os.pathsep.join((str(tree), str(package)))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True)


def succeed(*command: str, package: Path, tree: Path = ROOT) -> None:
    done = run(*command, package=package, tree=tree)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    for name, (text, _) in PACKAGES.items():
        install_component(folder, name, name, HEAD + text)
    return folder


@pytest.mark.slow
def test_components_of_other_packages_train_and_are_resumed(package: Path, tmp_path: Path) -> None:
    options = [option for _, chosen in PACKAGES.values() for option in chosen]
    folders = {name: f"hydra.run.dir={tmp_path / name}" for name in ("whole", "again", "without")}
    options.append("trainer.keep_checkpoints=true")
    succeed("train.py", *QUICK, *options, folders["whole"], package=package)
    half_way = f"resume={tmp_path / 'whole' / 'checkpoint_0000010.pt'}"
    succeed("train.py", *QUICK, *options, half_way, folders["again"], package=package)
    whole, resumed = (load_checkpoint(tmp_path / each) for each in ("whole", "again"))
    assert differences(whole, resumed) == ["state.train_seconds", "state.config.resume"]
    assert whole["gain"]["logs"].all()
    assert (whole["skylight"]["color"] != 0.5).all()
    assert all(state["mean"].any() for state in whole["optimizer"]["lion"]["state"].values())
    # The same in Python, and without one of them at a time.
    program = """
import sys
from pathlib import Path
import torch, voxelfield
from voxelfield.runs.train import load_configured_scene
from voxelfield.settings import preset
for name in ("all", "bright", "gain", "skylight", "lion"):
    off = {"bright": "trainer.loss.bright=0", "gain": "trainer.gain=false", "skylight": "trainer.skylight.weight=0",
           "lion": "optimizer.lion=false"}.get(name)
    given = [each for each in sys.argv[2:] if name != "gain" or "gain_lr" not in each]
    settings = preset(*given, *([] if off is None else [off]), device="cpu")
    session = voxelfield.Session(load_configured_scene(settings, Path.cwd()), settings)
    assert name not in [component.name for component in session.components]
    session.fit()
    torch.save(session.field.state_dict(), f"{sys.argv[1]}/{name}.pt")
"""
    given = [option for option in QUICK if not option.startswith("device")]
    succeed("-c", program, str(tmp_path), *given, *options, package=package)
    field = {key.removeprefix("field."): value for key, value in whole["model"].items() if key.startswith("field.")}
    assert differences(torch.load(tmp_path / "all.pt"), field) == []
    for name in PACKAGES:
        assert differences(torch.load(tmp_path / f"{name}.pt"), field) != []
    # The preset that is given replaces the recorded settings of the trainer, but not those of the optimizer.
    refused = run("train.py", *QUICK, "optimizer.gain_lr=0.01", half_way, folders["without"], package=package).stderr
    assert "trainer.gain must be true, as in the checkpoint, got false" in refused


@pytest.mark.slow
def test_wrong_settings_are_refused_by_name(package: Path) -> None:
    expected = {
        ("trainer.gain=true", "trainer.exposure=affine"): "trainer.gain must be false with trainer.exposure=affine",
        ("optimizer.lion=true", "optimizer.matrices=muon"): "optimizer.lion must be false with optimizer.matrices=muon",
        ("optimizer.gain_lr=0.5",): "optimizer.gain_lr must be left at 0.01 where trainer.gain is false, got 0.5",
        ("trainer.skylight.weight=-1",): "trainer.skylight.weight must be at least 0, got -1.0",
    }
    program = """
import sys
from voxelfield.settings import preset
for given in sys.argv[1:]:
    try:
        preset(*given.split())
    except ValueError as error:
        print(error)
"""
    done = run("-c", program, *map(" ".join, expected), package=package)
    found = done.stdout.splitlines()
    assert len(found) == len(expected), done.stderr
    assert all(line.startswith(message) for line, message in zip(found, expected.values(), strict=True)), found
    done = run("train.py", *QUICK, "trainer.skylight.wieght=1", package=package)
    assert done.returncode == 2
    assert "did you mean trainer.skylight.weight?" in done.stderr


@pytest.mark.slow
def test_a_package_that_cannot_be_used_harms_no_other_run(tmp_path: Path) -> None:
    install_component(tmp_path, "broken", "there_is_no_such_module")
    install_component(tmp_path, "again", "again", HEAD + WEIGHT.replace("trainer.loss.bright", "trainer.loss.robust"))
    late = WEIGHT.replace('name = "bright"', 'name = "bright"\n    after = ("foo",)', 1)
    install_component(tmp_path, "late", "late:BrightSettings", HEAD + late)
    check = "    def check(self, config, prefix):\n        raise KeyError(prefix)\n\n"
    failing = WEIGHT.replace("bright", "dull").replace("    def build", f"{check}    def build")
    install_component(tmp_path, "failing", "failing", HEAD + failing)
    done = run("train.py", "trainer.steps=-1", package=tmp_path)
    assert "component broken is not available, because there_is_no_such_module cannot be used" in done.stderr
    assert "BrightSettings must have a key of its own, got trainer.loss.robust" in done.stderr
    assert "trainer.steps must be at least 1, got -1" in done.stderr
    done = run("train.py", *QUICK, "trainer.loss.bright=1", package=tmp_path)
    assert "BrightSettings.after must name components, average, bright" in done.stderr
    assert "got 'foo'" in done.stderr
    done = run("train.py", *QUICK, "trainer.loss.dull=1", package=tmp_path)
    assert "component dull of the package failing cannot be used: KeyError: ''" in done.stderr


@pytest.mark.slow
def test_components_that_would_break_every_run_are_left_out(tmp_path: Path) -> None:
    for name, (line, _) in UNUSABLE.items():
        text = WEIGHT.replace(KEY, line).replace('name = "bright"', f'name = "{name}"')
        install_component(tmp_path, name, name, HEAD + text)
    install_component(tmp_path, "skylight", "skylight", HEAD + BACKGROUND)
    program = """
from voxelfield.components.registry import recorded, registered
from voxelfield.settings import preset

print(*[kind.name for kind in registered() if not kind.__module__.startswith("voxelfield")])
off, on = preset(device="cpu"), preset("trainer.skylight.weight=0.5", device="cpu")
print(off.trainer.skylight.lr, hasattr(off.trainer.loss, "bright"), recorded(off)["trainer"].get("skylight"))
print(recorded(on)["trainer"]["skylight"])
"""
    done = run("-c", program, package=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["skylight", "0.05 False None", "{'weight': 0.5, 'lr': 0.05}"]
    lines = done.stderr.splitlines()
    assert len(lines) == len(UNUSABLE), done.stderr
    for name, (_, reason) in UNUSABLE.items():
        start = f"component {name} is not available, because {name} cannot be used: "
        assert [reason in line for line in lines if start in line] == [True], (name, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "error", "words"),
    [
        ("prepare", "SystemExit(0)", "SystemExit: 0"),
        ("build", "SystemExit(2)", "SystemExit: 2"),
        ("prepare", "KeyboardInterrupt()", "KeyboardInterrupt"),
        ("build", "RuntimeError('far off')", "RuntimeError: far off"),
        ("prepare", "StopIteration()", "RuntimeError: generator raised StopIteration"),
    ],
)
def test_a_component_that_ends_training_is_named(tmp_path: Path, hook: str, error: str, words: str) -> None:
    line = {"prepare": "        batch.weigh", "build": "        return [Bright"}[hook]
    leaving = WEIGHT.replace(line, f"        raise {error}\n{line}")
    install_component(tmp_path, "leaving", "leaving", HEAD + leaving)
    directory = tmp_path / "run"
    done = run("train.py", *QUICK, "trainer.loss.bright=1", f"hydra.run.dir={directory}", package=tmp_path)
    raiser = "the entry point leaving = leaving of voxelfield.components"
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"training was ended by {raiser}, which raised {words}\n" in done.stderr
    assert "Traceback" not in done.stdout
    assert f"in {hook}\n    raise {error}\n" in (directory / "train.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "words"), [("SystemExit(0)", "SystemExit: 0"), ("KeyboardInterrupt()", "KeyboardInterrupt")]
)
def test_settings_of_a_component_that_end_the_program_are_named(tmp_path: Path, error: str, words: str) -> None:
    asked = f"    @property\n    def is_on(self):\n        raise {error}\n\n    def build"
    install_component(tmp_path, "leaving", "leaving", HEAD + WEIGHT.replace("    def build", asked))
    done = run("train.py", *QUICK, "trainer.loss.bright=1", package=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"component bright of the package leaving cannot be used: {words}"]
    done = run("train.py", "trainer.steps=-1", package=tmp_path)
    assert "trainer.steps must be at least 1, got -1" in done.stderr, "runs without it go on"


@pytest.mark.slow
def test_a_component_of_ours_computes_the_same_outside(tmp_path: Path) -> None:
    tree, inside = tmp_path / "tree", ROOT / "voxelfield"
    (tree / "voxelfield" / "components").mkdir(parents=True)
    # The folder of a program is that of the file itself, not of a link to it.
    shutil.copy(ROOT / "train.py", tree)
    for folder, kept in (
        (ROOT, {"voxelfield", "train.py"}),
        (inside, {"components"}),
        (inside / "components", {"sharpness.py"}),
    ):
        for path in folder.iterdir():
            if path.name not in {*kept, "__pycache__", ".git"}:
                (tree / path.relative_to(ROOT)).symlink_to(path)
    install_component(tmp_path, "moved", "moved", (inside / "components" / "sharpness.py").read_text(encoding="utf-8"))
    states = []
    for name, where in (("inside", ROOT), ("outside", tree)):
        options = ("trainer.loss.sharpness=1", f"hydra.run.dir={tmp_path / name}")
        succeed("train.py", *QUICK, *options, package=tmp_path / ("tree" if name == "inside" else ""), tree=where)
        states.append(load_checkpoint(tmp_path / name))
    assert differences(*states) == ["state.train_seconds"]
