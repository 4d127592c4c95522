"""The choice of the tests and cases that run."""

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

@pytest.mark.slow
def test_slow(request):
    request.config.cases.append("slow")

@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_device(request, device):
    request.config.cases.append(device)
"""


@pytest.fixture
def cases(pytester, request, monkeypatch):
    """Runs a module with the project's conftest and returns what its cases note; ``.made`` are the cases collected."""
    made: list[str] = []

    def run(groups: str, *options: str, name: str = "test_module.py") -> list[tuple]:
        monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        conftest = (request.config.rootpath / "tests" / "conftest.py").read_text()
        pytester.syspathinsert(request.config.rootpath / "tests")
        noted: list[tuple] = []
        made.clear()

        class Notes:
            @staticmethod
            def pytest_itemcollected(item: pytest.Item) -> None:
                made.append(item.name)

            @staticmethod
            def pytest_configure(config: pytest.Config) -> None:
                config.cases = noted

        pytester.makeconftest(conftest)
        pytester.makepyfile(test_module=MODULE.format(groups=groups))
        result = pytester.inline_run("-q", "-p", "no:cacheprovider", *options, name, plugins=[Notes()])
        assert result.ret == 0
        return noted

    run.made = made
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
    everything = cases("", "--sweep", "-k", "many or long")
    assert len(everything) == 2 * 4 * 3 * 2 + 1
    assert "long" in everything
    assert cases("", name="test_module.py::test_long") == ["long"]
    assert len(cases("", "--sweep", "-m", "sweep")) == 2 * (24 - 12) + 1


def test_slow_tests_run_when_asked_for(cases):
    assert "slow" not in cases("")
    assert cases("", "--slow", "-m", "slow") == ["slow"]
    assert cases("", name="test_module.py::test_slow") == ["slow"]


def test_a_share_is_one_of_the_sweeps_alone(cases):
    shares = [cases("", "--slow", "--sweep", "--share", f"{number}/3") for number in (1, 2, 3)]
    always = cases("", "--slow")
    sweeps = cases("", "--sweep", "-m", "sweep")
    assert "slow" in always
    assert all(set(always) <= set(share) for share in shares)
    assert sorted(map(str, itertools.chain(*shares))) == sorted(map(str, 3 * always + sweeps))
    assert max(map(len, shares)) < len(always) + len(sweeps)


def test_cases_that_are_left_out_are_made_only_where_they_may_be_named(cases, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    few = cases("", name=".")
    assert len([name for name in cases.made if "test_many" in name]) == 2 * 12
    assert "test_device[cuda]" not in cases.made
    assert cases("") == few
    assert len([name for name in cases.made if "test_many" in name]) == 2 * 24
    assert "test_device[cuda]" in cases.made
    left_out = ("cpu", 1, "a", False), ("cpu", 1, "a", True)
    for device, size, kind, flag in set(left_out) - set(few):
        name = f"test_module.py::test_many[{device}-{size}-{kind}-{flag}]"
        assert cases("", name=name) == [(device, size, kind, flag)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "cuda" in cases("", name=".")


def test_a_machine_that_must_have_a_gpu_fails_without_one(cases, monkeypatch, pytester):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("VOXELFIELD_REQUIRE_CUDA", "1")
    with pytest.raises(AssertionError):
        cases("", name=".")
    assert "test_device[cuda]" in cases.made
