"""The choice of the cases that always run."""

from __future__ import annotations

import itertools

import pytest

pytest_plugins = ["pytester"]

VALUES = {"device": ["cpu", "cuda"], "size": [1, 2, 3, 4], "kind": ["a", "b", "c"], "flag": [False, True]}
MODULE = f"""
import pytest

def parity(size, flag):
    return size % 2, flag

@pytest.mark.covering({{groups}})
@pytest.mark.parametrize("flag", {VALUES["flag"]})
@pytest.mark.parametrize("kind", {VALUES["kind"]})
@pytest.mark.parametrize("size", {VALUES["size"]})
@pytest.mark.parametrize("device", {VALUES["device"]})
def test_many(request, device, size, kind, flag):
    request.config.cases.append((device, size, kind, flag))

def test_one(request):
    pass

@pytest.mark.sweep
def test_long(request):
    request.config.cases.append("long")
"""


@pytest.fixture
def cases(pytester, request, monkeypatch):
    """Runs a module with the project's conftest and returns what its cases note."""

    def run(groups: str, *options: str, name: str = "test_module.py") -> list[tuple]:
        monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        conftest = (request.config.rootpath / "tests" / "conftest.py").read_text()
        pytester.syspathinsert(request.config.rootpath / "tests")
        noted: list[tuple] = []

        class Notes:
            @staticmethod
            def pytest_configure(config: pytest.Config) -> None:
                config.cases = noted

        pytester.makeconftest(conftest)
        pytester.makepyfile(test_module=MODULE.format(groups=groups))
        result = pytester.inline_run("-q", "-p", "no:cacheprovider", *options, name, plugins=[Notes()])
        assert result.ret == 0
        return noted

    return run


@pytest.mark.parametrize(("groups", "together"), [("", []), ('"size kind flag"', [("size", "kind", "flag")])])
def test_every_pair_and_every_group_of_values_is_there_on_each_device(cases, groups, together):
    chosen = cases(groups)
    names = list(VALUES)
    for device in VALUES["device"]:
        own = [dict(zip(names, case, strict=True)) for case in chosen if case[0] == device]
        for group in [*itertools.combinations(names[1:], 2), *together]:
            shown = {tuple(case[name] for name in group) for case in own}
            assert shown == set(itertools.product(*(VALUES[name] for name in group))), group
        assert len(own) == (24 if together else 12), "as few as pairs of the two longest lists allow"


def test_sweeps_run_when_asked_for(cases):
    assert "long" not in cases("")
    everything = cases("", "--sweep")
    assert len(everything) == 2 * 4 * 3 * 2 + 1
    assert "long" in everything
    assert cases("", name="test_module.py::test_long") == ["long"]
    assert len(cases("", "--sweep", "-m", "sweep")) == 2 * (24 - 12) + 1
