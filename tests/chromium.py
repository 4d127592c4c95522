"""A headless browser that finds no other host than this one."""

from __future__ import annotations

import contextlib
import functools
import http.server
import io
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

PATIENCE = 90
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # WebGL without a GPU.
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def eventually(condition: Callable[[], object], what: str = "a condition") -> None:
    """Waits until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


class Browser:
    """What a user does with a page."""

    def __init__(self, driver, downloads: Path) -> None:
        self.driver = driver
        self.downloads = downloads

    def open(self, url: str) -> None:
        self.driver.get(url)
        eventually(lambda: self.find("//*[@role='tab']"), "the page's panels")

    def find(self, xpath: str) -> list:
        from selenium.webdriver.common.by import By

        return [element for element in self.driver.find_elements(By.XPATH, xpath) if element.is_displayed()]

    def click(self, xpath: str) -> None:
        from selenium.common.exceptions import WebDriverException

        def clicked() -> bool:
            # Panels are laid out anew while one looks for their elements.
            with contextlib.suppress(WebDriverException, IndexError):
                self.find(xpath)[0].click()
                return True
            return False

        eventually(clicked, f"a click at {xpath}")

    def tab(self, name: str) -> None:
        self.click(f"//*[@role='tab'][@title='{name}']")

    def button(self, label: str) -> None:
        self.click(f"//button[contains(., '{label}')]")

    def checkbox(self, label: str) -> None:
        self.click(f"//label[contains(., '{label}')]/following::input[@type='checkbox'][1]")

    def choose(self, label: str, option: str) -> None:
        self.click(f"//label[contains(., '{label}')]/following::input[1]")
        self.click(f"//*[@role='option'][normalize-space(.)='{option}']")

    @property
    def canvas(self):
        return self.find("//canvas")[0]

    def drag(self, start: tuple[int, int], by: tuple[int, int]) -> None:
        """Drags on the canvas, from pixels right of and below its top left corner."""
        from selenium.webdriver.common.action_chains import ActionChains

        canvas = self.canvas
        x, y = start[0] - canvas.size["width"] // 2, start[1] - canvas.size["height"] // 2
        actions = ActionChains(self.driver).move_to_element_with_offset(canvas, x, y).click_and_hold()
        if by != (0, 0):
            actions = actions.move_by_offset(*by)
        actions.release().perform()

    def press(self, key: str, seconds: float) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).key_down(key).pause(seconds).key_up(key).perform()

    def picture(self) -> torch.Tensor:
        """Returns what the page shows, (H, W, 3) uint8."""
        image = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        return torch.from_numpy(np.array(image))

    def downloaded(self, pattern: str) -> Path:
        """Returns a file that the page has given, once it is complete."""
        eventually(lambda: list(self.downloads.glob(pattern)), pattern)
        return next(self.downloads.glob(pattern))

    def complaints(self) -> list[str]:
        """Returns what the browser has said since the last call about pages that do what they may not."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def requested(self) -> set[str]:
        """Returns the addresses requested so far, without those of the browser's own pages."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        kinds = {"Network.requestWillBeSent", "Network.webSocketCreated"}
        sent = [message["params"] for message in messages if message["method"] in kinds]
        urls = {params.get("url") or params["request"]["url"] for params in sent}
        return {url for url in urls if not url.startswith(("chrome:", "chrome-untrusted:", "data:", "devtools:"))}


@contextlib.contextmanager
def chromium(folder: Path, size: tuple[int, int]) -> Iterator[Browser]:
    """Starts a browser of its own, or skips where there is none."""
    pytest.importorskip("selenium", reason="needs selenium to drive a browser")
    binary = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.skip("needs Chromium and chromedriver on the PATH")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    downloads = folder / "downloads"
    downloads.mkdir()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in (*_OPTIONS, f"--window-size={size[0]},{size[1]}", f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(option)
    # 1: a page may give several files without asking.
    several = "profile.default_content_setting_values.automatic_downloads"
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads), several: 1})
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    try:
        yield Browser(driver, downloads)
    finally:
        driver.quit()


def browser_fixture(size: tuple[int, int]) -> Callable[..., Iterator[Browser]]:
    """Makes the fixture of a browser that the tests of a module share."""

    @pytest.fixture(scope="module")
    def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
        with chromium(tmp_path_factory.mktemp("chromium"), size) as started:
            yield started

    return browser


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serves the files of a folder; gives the address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
