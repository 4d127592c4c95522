"""What tests of faults across the whole program share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from short_runs import Nursery


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Runs many short trainings, without importing torch for each."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "output.txt")
    yield nursery
    nursery.close()
