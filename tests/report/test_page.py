"""The page of a report: its content; it is self-contained, and hostile names remain plain text."""

from __future__ import annotations

import base64
import hashlib
import importlib
import re
from html.parser import HTMLParser

import pytest
from chromium import chromium, eventually
from records import METRICS, make_record, pictures

from voxelfield.report.page import OPEN_VIEWS, amount_of_memory, duration, make_page

NAMES = ("r_0", "r_1", "r_2")

# Elements that have no end tag.
_VOID = {"meta", "link", "img", "input"}

HOSTILE = """"><script>alert(1)</script><img src=https://example.org/x onerror=alert(2)>'{{ 7*7 }}&amp;"""


class Page(HTMLParser):
    """Elements and texts of a page; refuses end tags without a beginning."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def opened(**changes) -> tuple[str, Page]:
    """The HTML of a report, and the page that it is."""
    html = make_page(make_record(**changes))
    return html, Page(html)


def pictures_of(page: Page) -> list[dict[str, str | None]]:
    """Returns the pictures of views, without those at the top of the page."""
    images = [image for image in page.all("img") if "data-kind" in image]
    return images[2 * len([each for each in page.all("figure") if each.get("class") == "view"]) :]


def check_self_contained(page: Page, html: str) -> None:
    """Nothing in the page runs but its script, and nothing is fetched."""
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for tag, attributes in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "form", "foreignobject", "use"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "srcset", "action", "poster", "data"):
                assert re.match(r"data:|#", value), (tag, name, value[:60])
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert not re.search(r"url\(|@import|expression", style)
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert policy.endswith(f"; script-src 'sha256-{digest}'")


def test_a_report_shows_figures_curves_views_timing_and_how_to_repeat_it():
    html, page = opened(
        pictures=pictures(*NAMES),
        commands=(("Repeat the training", "voxelfield train scene=bricks"),),
        logged=("the log's warning",),
    )
    check_self_contained(page, html)
    for expected in (
        "30.00 dB",
        "12.5 s",
        "Nothing unusual was found.",
        "1 warning in the log the log's warning",
        "voxelfield train scene=bricks",
        "training, with previews and checkpoints 14.0 s 70 %",
        "samples of one step 1.50 GiB 75 %",
        "2.25 GiB",
        "31 x 32 x 33",
        "torch 2.13.0",
        "kind: dense",
    ):
        assert expected in page.text, expected
    assert "16-bit copies" not in page.text
    labels = [image["alt"] for image in page.all("img") if image["src"].startswith("data:image/svg+xml;base64,")]
    assert [label.split(" over ")[0] for label in labels[:3]] == ["PSNR", "Loss terms, weighted", "Rays per second"]


def test_the_worst_view_is_first_with_its_four_pictures():
    _, page = opened(pictures=pictures(*NAMES))
    images = pictures_of(page)
    kinds = [image["alt"].removesuffix(" of r_1") for image in images[:4]]
    assert kinds == ["render", "truth", "error", "depth"]
    assert [image["alt"] for image in images[4::4]] == ["render of r_0", "render of r_2"]
    for image in images:
        assert base64.b64decode(image["src"].partition(",")[2])[:2] == b"\xff\xd8"
        assert (image["width"], image["height"]) == ("12", "8")
    assert page.text.index("1. r_1 PSNR 28.00 dB, SSIM 0.9300") < page.text.index("2. r_0")


def test_the_video_stands_at_the_top_beside_the_best_and_the_worst_view():
    html, page = opened(pictures=pictures(*NAMES), video=b"mp4", previewed=NAMES)
    top = html.partition('<dl class="grid figures"')[0]
    assert page.all("video")[0]["src"] == f"data:video/mp4;base64,{base64.b64encode(b'mp4').decode()}"
    assert top.index("<video") < top.index("Best view: r_2") < top.index("Worst view: r_1")
    shown = re.findall(r'alt="(\w+ of \w+)"', top)
    assert shown == ["truth of r_2", "render of r_2", "truth of r_1", "render of r_1"]
    assert "mean of the test views r_0, r_1, r_2 30 dB" in page.text, "of which views a curve is"
    assert "Only view: r_0" in opened(pictures=pictures("r_0"))[1].text


@pytest.mark.long
def test_pictures_are_compared_and_enlarged_by_the_keyboard(tmp_path):
    path = tmp_path / "report.html"
    path.write_text(opened(pictures=pictures(*NAMES))[0])
    with chromium(tmp_path, (1280, 900)) as browser:
        browser.driver.get(path.as_uri())
        keys = importlib.import_module("selenium.webdriver.common.keys").Keys
        slider, large = "//*[@class='top']//input", "//dialog//input"
        browser.find(slider)[0].send_keys(keys.ARROW_LEFT)
        assert "--at: 49" in browser.find("//*[@class='top']//div")[0].get_attribute("style")
        assert not browser.find(large)
        browser.find("//button[@data-kind='depth']")[0].send_keys(keys.ENTER)
        enlarged = [image.get_attribute("alt") for image in browser.find("//dialog//img")]
        assert enlarged == ["truth of r_1", "depth of r_1"]
        browser.find(large)[0].send_keys(keys.ESCAPE)
        eventually(lambda: not browser.find(large), "the closing of the picture")
        assert browser.complaints() == []


def test_all_views_are_there_even_where_most_unfold():
    rows = [{"name": f"r_{index}", "psnr": 30 + index / 100, "ssim": 0.9} for index in range(40)]
    html, page = opened(per_view=rows, pictures=pictures(*(row["name"] for row in rows)))
    assert len(pictures_of(page)) == 4 * 40
    before, _, after = html.partition(f"The other {40 - OPEN_VIEWS} views")
    assert before.count('<div class="tiles view">') == OPEN_VIEWS
    assert after.partition("</details>")[0].count('<div class="tiles view">') == 40 - OPEN_VIEWS


def test_hostile_texts_stay_texts():
    rows = [{"name": HOSTILE, "psnr": 5.0, "ssim": 0.9}, *METRICS["per_view"]]
    record = make_record(
        scene=HOSTILE,
        split=HOSTILE,
        device=HOSTILE,
        drawn_by=HOSTILE,
        environment={HOSTILE: HOSTILE},
        seconds={HOSTILE: 1.0},
        per_view=rows,
        pictures=pictures(HOSTILE),
        commands=((HOSTILE, HOSTILE),),
        logged=(f"{HOSTILE}: 1 of 9 images are missing",),
        history={f"loss/{HOSTILE}": ((1, 1.0), (2, 0.5))},
    )
    record.config.scene.name = HOSTILE
    html = make_page(record)
    page = Page(html)
    check_self_contained(page, html)
    (title,) = re.findall(r"<title>(.*?): report", html)
    assert "<" not in title
    assert page.text.count("{{ 7*7 }}") >= 12  # shown as it is, everywhere
    assert len(pictures_of(page)) == 4
    assert pictures_of(page)[0]["alt"] == f"render of {HOSTILE}"


def test_a_run_without_records_pictures_or_optional_figures_has_a_report():
    optional = ("seconds", "estimated_gib", "peak_host_gib", "environment", "train_views", "image_size", "drawn_by")
    record = make_record(history={}, lpips=0.05, psnr_fitted=30.5, peak_gpu_gib=6.4, diverged=True)
    record = type(record)({k: v for k, v in record.metrics.items() if k not in optional}, record.config)
    page = Page(make_page(record))
    assert "logger=tensorboard" in page.text
    assert "LPIPS" in page.text
    assert "6.4 GiB" in page.text
    assert "Training diverged" in page.text


def test_the_page_is_structured_for_readers_of_all_kinds():
    html, page = opened(pictures=pictures(*NAMES))
    assert page.all("html") == [{"lang": "en"}]
    assert [tag for tag, _ in page.elements if tag in ("h1", "main", "nav")] == ["h1", "nav", "main"]
    assert [tag for tag, _ in page.elements if tag == "h2"] == ["h2"] * 5
    targets = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    links = [link["href"].removeprefix("#") for link in page.all("a")]
    assert len(links) == 5
    assert set(links) <= targets
    assert all(image["alt"] for image in page.all("img"))
    assert "color-scheme: light dark" in html
    assert "width=device-width" in html


def test_durations_read_well():
    assert [duration(value) for value in (4.25, 99.0, 125.0, 7300.0)] == ["4.2 s", "99.0 s", "2 min 5 s", "2 h 1 min"]


def test_memory_reads_well():
    shown = [amount_of_memory(value) for value in (0.01, 0.5, 1.0, 6.375)]
    assert shown == ["10.2 MiB", "512.0 MiB", "1.00 GiB", "6.38 GiB"]
