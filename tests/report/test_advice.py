from __future__ import annotations

import pytest
from records import METRICS, make_record

from voxelfield.report.advice import advise


def titles(**changes) -> list[str]:
    return [finding.title for finding in advise(make_record(**changes))]


def scores(*values: float) -> list[dict[str, object]]:
    return [{"name": f"r_{index}", "psnr": value, "ssim": 0.9} for index, value in enumerate(values)]


def history(**curves: tuple) -> dict[str, tuple]:
    return {tag.replace("__", "/"): curve for tag, curve in curves.items()}


def test_a_run_that_went_well_is_not_warned_of():
    assert titles() == []
    assert titles(history={}) == []


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"diverged": True, "psnr": 9.0, "history": {}}, "training diverged"),
        ({"psnr": 14.0, "history": {}}, "views hardly resemble their photographs"),
        ({"history": history(train__psnr=((1000, 37.0),))}, "the run overfits"),
        ({"split": "train"}, "no view was held out"),
        (
            {"logged": ("scene/transforms.json: 3 of 40 images are missing, the first is a.png; they are left out",)},
            "images are missing",
        ),
        ({"history": history(train__occupancy=((1000, 0.0001),))}, "the box is nearly empty"),
        ({"history": history(train__occupancy=((1000, 0.8),))}, "the box is full of fog"),
        ({"per_view": scores(30, 31, 30.5, 30, 31, 30, 30, 15)}, "some views are much worse than the others"),
        ({"psnr_fitted": 33.0}, "photographs differ in exposure"),
        ({"history": history(train__skipped_steps=((500, 2.0), (1000, 1.0)))}, "steps were skipped"),
        ({"history": history(test__psnr=((500, 27.0), (800, 28.0), (1000, 30.0)))}, "views were still improving"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_what_is_wrong_is_found_and_nothing_else(changes, title):
    assert titles(**changes) == [title]


def test_a_short_run_is_told_to_take_more_steps_and_not_to_doubt_the_capture():
    changes = {
        "psnr": 14.0,
        "history": history(train__occupancy=((150, 0.8),), test__psnr=((50, 9.0), (99, 9.1), (150, 14))),
    }
    (finding,) = advise(make_record(steps=150, **changes))
    assert finding.title == "the run was short"
    assert "more steps" in finding.message
    assert "poses" not in finding.message
    assert titles(steps=1000, **changes)[0] == "views hardly resemble their photographs"


def test_remembering_is_judged_by_fitted_exposure_and_needs_held_out_views():
    trained = history(train__psnr=((1000, 37.0),))
    assert titles(history=trained, psnr_fitted=30.5) == ["the run overfits"]
    assert "the run overfits" not in titles(history=trained, psnr_fitted=36.0)
    assert titles(history=trained, split="train") == ["no view was held out"]


def test_many_views_are_named_by_the_first_ones():
    (finding,) = advise(make_record(per_view=scores(*[30.0] * 100, *[10.0] * 7)))
    first = "r_100, r_101, r_102, r_103, r_104 and 2 more of 107, against a median of 30.0 dB"
    assert finding.message.startswith(first)


def test_every_message_is_one_line_with_something_to_do():
    found = advise(
        make_record(
            diverged=True,
            psnr=9.0,
            split="train",
            psnr_fitted=12.0,
            per_view=METRICS["per_view"],
            history=history(train__occupancy=((1, 0.9),), train__skipped_steps=((1, 1.0),)),
        )
    )
    assert len(found) >= 4
    for finding in found:
        assert "\n" not in finding.message
        assert not finding.message.endswith(".")
