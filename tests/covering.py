"""Which of a test's many cases always run: a few that cover what may go wrong together.

A test of several parameters is marked, beside its ``parametrize``::

    @pytest.mark.covering("dtype channels", by=compiled_form)

Then those cases always run that together show every pair of values of any two parameters, every combination of values
of each group of parameters that the mark names, and every result of the function ``by``, which is called with the
case's parameters that its own name. All other cases are marked ``sweep``. Each device has a choice of its own.
"""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Hashable

import pytest


def shows(case: pytest.Item, mark: pytest.Mark) -> set[Hashable]:
    """What a case shows, as the mark has it."""
    values = {name: repr(value) for name, value in case.callspec.params.items() if name != "device"}
    groups = [(name,) for name in values]
    groups += itertools.combinations(values, 2)
    groups += (tuple(names.split()) for names in mark.args)
    shown: set[Hashable] = {(group, tuple(values[name] for name in group)) for group in groups}
    if by := mark.kwargs.get("by"):
        shown.add(by(*(case.callspec.params[name] for name in inspect.signature(by).parameters)))
    return shown


def choose(sets: list[set[Hashable]]) -> set[int]:
    """Returns the indices of few sets whose union is that of all: one after another, that which adds most."""
    missing, chosen = set().union(*sets), set()
    while missing:
        best = max(range(len(sets)), key=lambda i: len(sets[i] & missing))
        chosen.add(best)
        missing -= sets[best]
    return chosen


def mark_sweeps(items: list[pytest.Item]) -> None:
    """Marks the cases of tests marked ``covering`` that are not among the chosen ones."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") is not None:
            tests[item.nodeid.partition("[")[0], item.callspec.params.get("device")].append(item)
    for cases in tests.values():
        chosen = choose([shows(case, case.get_closest_marker("covering")) for case in cases])
        for i, case in enumerate(cases):
            if i not in chosen:
                case.add_marker("sweep")
