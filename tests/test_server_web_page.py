"""The page's files: what they may load, that they name only each other, and who may have them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from engine.errors import ModelError
from server.settings import Settings
from server.web_page import FOLDER, Page
from support.live_server import LiveServer, live_server
from support.scripted import scripted_client

FILES = sorted(FOLDER.iterdir())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = Settings(access_log=False, api_key=(SecretStr("first"),))
    with live_server(scripted_client(), settings) as server:
        yield server


def test_the_page_needs_no_key_but_its_data_does(server: LiveServer) -> None:
    assert server.http.get("/").status_code == 200
    for path in Page().paths:
        assert server.http.get(path).status_code == server.http.head(path).status_code == 200
    for path in ("/v1/live", "/v1/models", "/metrics", "/page/../v1/models", "/page/nothing.js", "/page/"):
        assert server.http.get(path).status_code == 401


def test_no_inline_script_and_no_other_server_can_be_used(server: LiveServer) -> None:
    for path in Page().paths:
        headers = server.http.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"


def test_an_unchanged_file_is_not_sent_again(server: LiveServer) -> None:
    first = server.http.get("/page/main.js")
    assert first.headers["Cache-Control"] == "no-cache"
    again = server.http.get("/page/main.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "Content-Security-Policy" in again.headers


def test_the_page_is_there_before_a_model_is() -> None:
    def fail(progress: object) -> object:
        raise ModelError("there is no such model")

    from engine.client import InProcessClient

    with live_server(InProcessClient(fail), Settings(access_log=False), is_ready=False) as server:  # type: ignore[arg-type]
        assert server.http.get("/").status_code == 200
        assert server.http.get("/v1/live").status_code == 503


def test_no_page_turns_it_off() -> None:
    with live_server(scripted_client(), Settings(access_log=False, page=False)) as server:
        assert {server.http.get(path).status_code for path in Page().paths} == {404}


def test_every_file_that_is_named_is_there_and_every_other_is_named() -> None:
    named = set(re.findall(r'(?:href|src)="page/([^"]+)"', (FOLDER / "index.html").read_text()))
    for script in SCRIPTS:
        named |= set(re.findall(r'from "\./([^"]+)"', script.read_text()))
    assert named | {"index.html"} == {path.name for path in FILES}


def test_nothing_comes_from_elsewhere() -> None:
    for path in FILES:
        urls = re.findall(r"https?://[^\s\"')<]+", path.read_text())
        assert set(urls) <= {"http://www.w3.org/2000/svg"}, path


def test_text_never_becomes_markup_or_code() -> None:
    """What a model or a server says is put in as text; the policy would stop scripts, not forged elements."""
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(\"(on|style)"
    )
    for script in SCRIPTS:
        assert re.findall(forbidden, script.read_text()) == [], script
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"\son\w+=|style=|<script(?![^>]* src=)", page) == []


def test_every_element_that_scripts_ask_for_is_on_the_page() -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', (FOLDER / "index.html").read_text()))
    asked = {name for script in SCRIPTS for name in re.findall(r'\$\("([^"]+)"\)', script.read_text())}
    assert asked <= ids
