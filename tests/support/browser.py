"""A headless Chromium, driven over chromedriver's HTTP protocol (W3C WebDriver). Needs both programs, no package.

with browser(tmp_path) as page:
    page.open(server.url)
    page.wait("return document.title")
"""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

WAIT_S = 20.0
"""A page that takes longer has failed."""
INSTALL_LINE = "apt-get install chromium chromium-driver"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)

needs_chromium = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")), reason=f"needs chromium: {INSTALL_LINE}"
)


class Page:
    """One tab. A script is the body of a function; what it returns comes back as JSON."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = f"/session/{session}"

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._call("POST", "/execute/sync", {"script": script, "args": arguments})

    def wait(self, script: str, *arguments: Any) -> Any:
        """Until the script returns something true; -> that."""
        until_s = time.monotonic() + WAIT_S
        while not (told := self.run(script, *arguments)):
            assert time.monotonic() < until_s, f"never true: {script}; on the page: {self.text()}; said: {self.log()}"
            time.sleep(0.05)
        return told

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def type(self, element_id: str, text: str) -> None:
        self._call("POST", f"/element/{self._find(element_id)}/value", {"text": text})

    def click(self, element_id: str) -> None:
        self._call("POST", f"/element/{self._find(element_id)}/click", {})

    def point(self, selector: str) -> None:
        """Move the pointer onto the first element that matches."""
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": element}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self._call("POST", "/actions", {"actions": [pointer]})

    def resize(self, width: int, height: int) -> None:
        self._call("POST", "/window/rect", {"width": width, "height": height})

    def log(self) -> list[str]:
        """What the browser complained about since the last call: errors of scripts, of the policy, of loads."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def screenshot(self) -> bytes:
        """PNG."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def _find(self, element_id: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": f"#{element_id}"})
        return str(next(iter(found.values())))

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._http.request(method, self._session + path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, f"{path}: {value}"
        return value


@contextmanager
def browser(folder: Path, *, width: int = 1440, height: int = 900, scale: float = 1.0) -> Iterator[Page]:
    """folder: the browser's profile, new. Ends both programs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [*_FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]
    flags.append(f"--force-device-scale-factor={scale}")
    wanted = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": flags},
        "goog:loggingPrefs": {"browser": "ALL"},
    }
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
    try:
        _wait_up(http)
        answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
        assert "sessionId" in answer, answer
        session = answer["sessionId"]
        try:
            yield Page(http, session)
        finally:
            http.delete(f"/session/{session}")
    finally:
        http.close()
        driver.terminate()
        driver.wait(10)


def _wait_up(http: httpx.Client) -> None:
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            if http.get("/status").json()["value"]["ready"]:
                return
        except httpx.TransportError:
            assert time.monotonic() < until_s, "chromedriver does not answer"
        time.sleep(0.05)
