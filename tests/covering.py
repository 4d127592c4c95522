"""Which of a test's many cases always run: a few that cover what may go wrong together.

A test of several parameters is marked, beside its ``parametrize``::

    @pytest.mark.covering("dtype channels", by=compiled_form)

Then those cases always run that together show every pair of values of any two parameters, every combination of values
of each group of parameters that the mark names, and every result of the function ``by``, which is called with the
case's parameters that its own name. All other cases are marked ``sweep``. Each device has a choice of its own.
"""

from __future__ import annotations

import functools
import heapq
import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping

import pytest


@functools.cache
def parameters_of(function: Callable[..., Hashable]) -> tuple[str, ...]:
    """Returns the names of a function's parameters, which take a while to find."""
    return tuple(inspect.signature(function).parameters)


def shows(params: Mapping[str, object], mark: pytest.Mark) -> set[Hashable]:
    """What a case with these parameters shows, as the mark has it."""
    values = {name: repr(value) for name, value in params.items() if name != "device"}
    groups = [(name,) for name in values]
    groups += itertools.combinations(values, 2)
    groups += (tuple(names.split()) for names in mark.args)
    shown: set[Hashable] = {(group, tuple(values[name] for name in group)) for group in groups}
    if by := mark.kwargs.get("by"):
        shown.add(by(*(params[name] for name in parameters_of(by))))
    return shown


def choose(sets: list[set[Hashable]]) -> set[int]:
    """Returns the indices of few sets whose union is that of all: one after another, that which adds most."""
    missing, chosen = set().union(*sets), set()
    # How much each set may add at the most: what it added when it was last looked at, as that only decreases.
    bounds = [(-len(shown), i) for i, shown in enumerate(sets)]
    heapq.heapify(bounds)
    while missing:
        _, best = heapq.heappop(bounds)
        adds = (-len(sets[best] & missing), best)
        if bounds and adds > bounds[0]:
            heapq.heappush(bounds, adds)
            continue
        chosen.add(best)
        missing -= sets[best]
    return chosen


def mark_sweeps(metafunc: pytest.Metafunc) -> None:
    """Marks the cases of a test marked ``covering`` that are not among the chosen ones."""
    mark = metafunc.definition.get_closest_marker("covering")
    if mark is None:
        return
    cases = defaultdict(list)
    for call in metafunc._calls:
        cases[call.params.get("device")].append(call)
    for calls in cases.values():
        chosen = choose([shows(call.params, mark) for call in calls])
        for i, call in enumerate(calls):
            if i not in chosen:
                call.marks.append(pytest.mark.sweep.mark)
