"""What other people's pages, links and names can do to the page in a browser."""

from __future__ import annotations

import shlex
import socket

import pytest
from chromium import browser_fixture, eventually, serving
from viewer_scene import served_page

pytestmark = [pytest.mark.long]
pytest.importorskip("viser")

browser = browser_fixture((1000, 700))


@pytest.fixture
def foreign_page(tmp_path):
    """A function that serves a page of somebody else's; gives its address."""

    def serve(content: str):
        (tmp_path / "index.html").write_text(content)
        return serving(tmp_path)

    return serve


def connecting(port: int) -> str:
    import viser

    return f"""<title>waiting</title><script>
    const socket = new WebSocket("ws://127.0.0.1:{port}", ["viser-v{viser.__version__}"]);
    socket.onopen = () => {{ document.title = "opened"; }};
    socket.onerror = () => {{ document.title = "refused"; }};
    </script>"""


def test_a_foreign_page_cannot_connect(browser, foreign_page):
    with served_page() as page, foreign_page(connecting(page.address.port)) as url:
        browser.driver.get(url)
        eventually(lambda: browser.driver.title != "waiting", "an answer")
        assert browser.driver.title == "refused"


def test_a_foreign_page_cannot_frame_the_page(browser, foreign_page):
    with served_page() as page, foreign_page(f'<iframe src="{page.address.url}"></iframe>') as url:
        browser.complaints()
        browser.driver.get(url)
        eventually(lambda: any("frame" in text for text in browser.complaints()), "a refused frame")


def test_a_link_cannot_make_the_page_obey_another_server(browser):
    with served_page() as page, socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0)
        browser.complaints()
        browser.driver.get(f"{page.address.url}/?websocket=ws://127.0.0.1:{other.getsockname()[1]}")
        eventually(lambda: any("Content Security Policy" in text for text in browser.complaints()), "a refusal")
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_runs_name_is_text(browser):
    script = "parent.document.title='owned'"
    name = f'a`<iframe srcdoc="<script>{script}</script>"></iframe><img src=x onerror="{script}">'
    with served_page(name=name) as page:
        browser.open(page.address.url)
        browser.tab("Path")
        shown = "//label[contains(., 'Command')]/following::textarea[1]"
        eventually(lambda: browser.find(shown), "the command")
        assert shlex.quote(name) in browser.find(shown)[0].get_attribute("value")
        assert browser.driver.find_elements("css selector", "iframe, img[src='x']") == []
        assert browser.driver.title != "owned"


def test_a_page_for_other_machines_opens_with_its_token_alone(browser):
    with served_page(host="0.0.0.0") as page:
        bare = f"http://127.0.0.1:{page.address.port}/"
        browser.driver.get(bare)
        assert "?token=" in browser.driver.page_source
        assert browser.driver.find_elements("css selector", "canvas") == []
        browser.open(page.address.url)
        eventually(lambda: page.server.get_clients(), "a connection")
        # The browser now knows the token.
        browser.open(bare)
        browser.driver.delete_all_cookies()
        browser.driver.get(bare)
        assert browser.driver.find_elements("css selector", "canvas") == []
