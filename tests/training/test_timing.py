"""Where the wall clock goes."""

from __future__ import annotations

from voxelfield.runs.timing import Timing


def test_time_is_divided_among_the_parts_without_a_gap():
    now = 10.0
    timing = Timing(lambda: now)
    for part, at in (("load", 12.5), ("train", 20.0), ("load", 21.0)):
        now = at
        timing.end(part)
    assert timing.seconds() == {"load": 3.5, "train": 7.5}
    assert str(timing) == "load 3.5 s, train 7.5 s"
