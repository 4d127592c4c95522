"""How many examples are tried: few and always the same by default, many new ones with a profile; and a tally.

VOXELFIELD_FUZZ_EXAMPLES=3000 python -m pytest tests/fuzz --hypothesis-profile=long
"""

from __future__ import annotations

import os

import fuzz_property
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

# Examples that are slow to make or often refused are no mistake here.
_CHECKS = (
    HealthCheck.too_slow,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
)

# All but to explain a failure, which takes long and says little.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)

# Derandomised: a change to the code can make these fail, chance cannot. A time limit for an example would be chance.
settings.register_profile(
    "few",
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=_PHASES,
    suppress_health_check=_CHECKS,
)
settings.register_profile(
    "long",
    max_examples=int(os.environ.get("VOXELFIELD_FUZZ_EXAMPLES", "3000")),
    deadline=None,
    print_blob=True,
    phases=_PHASES,
    suppress_health_check=_CHECKS,
)
settings.load_profile("few")

# Hypothesis mixes the constants of all imported modules into its examples. Which modules are imported depends on the
# tests that ran before, and derandomised examples must not.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tally = fuzz_property.tally
    if tally:
        terminalreporter.section("fuzzing, cases in this process")
        for name in sorted(tally):
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tally[name].items()))
            terminalreporter.write_line(f"{name}: {counts}")
        total = sum(map(sum, (counts.values() for counts in tally.values())))
        terminalreporter.write_line(f"{total} cases in all")
