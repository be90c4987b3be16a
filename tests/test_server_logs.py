"""The log: every line of a machine's is an object, every line of a request carries its id, no line carries a secret."""

from __future__ import annotations

import io
import json
import logging
import signal
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine import logs
from server.settings import Settings
from support.live_server import live_server
from support.scripted import scripted_client
from support.scripted_server import ServerProcess

SECRETS = ("a-key-of-mine", "wrong-key-given", "hidden-in-a-query", "what was asked", "what-is-salted")
NAME = "job-7/of:mine"


def ask(url: str, body: dict[str, Any], path: str = "/v1/completions", key: str = SECRETS[0]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": NAME, "X-Api-Key": key, "Cookie": SECRETS[0]}
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=20, trust_env=False)


def life(*options: str) -> tuple[str, str, list[httpx.Response]]:
    """Standard output and error of a whole server that is asked for good and bad things, then stopped."""
    with ServerProcess("--api-key", SECRETS[0], *options) as server:
        ready = server.ready_line()
        answers = [
            ask(server.url, {"prompt": [5, 6], "max_tokens": 3, "cache_salt": SECRETS[4]}),
            ask(server.url, {"prompt": [5, 6], "max_tokens": 3}, path=f"/v1/completions?api_key={SECRETS[2]}"),
            ask(server.url, {"prompt": SECRETS[3], "max_tokens": -1}),
            ask(server.url, {"prompt": [5, 6], "max_tokens": 300, "timeout": 1e-9}),
            ask(server.url, {"messages": SECRETS[3]}, path="/v1/chat/completions"),
            ask(server.url, {}, key=SECRETS[1]),
            ask(server.url, {}, path="/nowhere"),
        ]
        server.signal(signal.SIGTERM)
        code, output, complaint = server.ended()
    assert code == 0
    return ready + output, complaint, answers


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    output, complaint, answers = life("--log-format", "json", "scripted")
    assert [answer.status_code for answer in answers] == [200, 200, 400, 504, 400, 401, 404]
    assert {answer.headers["X-Request-Id"] for answer in answers} == {NAME}
    assert output.startswith("ready: ")
    assert output.count("\n") == 1
    assert not any(secret in complaint for secret in SECRETS)
    return [json.loads(line) for line in complaint.splitlines()]


def test_every_line_of_json_says_when_where_and_how_bad(records: list[dict[str, Any]]) -> None:
    assert len(records) > 8
    for record in records:
        assert {"time", "level", "logger", "process", "pid", "message"} <= record.keys()
        assert record["level"] in ("info", "warning", "error")
        assert record["time"].endswith("Z")


def test_what_a_person_is_told_of_the_start_and_the_end_is_in_the_log_too(records: list[dict[str, Any]]) -> None:
    messages = [record["message"] for record in records]
    assert "reading the script (1 of 2)" in messages
    assert "stopping; requests have 30 s to finish" in messages


def test_an_answer_is_one_line_with_its_fields(records: list[dict[str, Any]]) -> None:
    answered = [record for record in records if record["logger"] == "cellserve.access"]
    assert [record["status"] for record in answered] == [200, 200, 400, 504, 400, 401, 404]
    for record in answered:
        assert (record["request_id"], record["method"], record["client"]) == (NAME, "POST", "127.0.0.1")
        assert 0 <= record["duration_s"] < 20
    assert answered[1]["path"] == "/v1/completions"


def test_the_engines_reason_carries_the_callers_id(records: list[dict[str, Any]]) -> None:
    [failed] = [record for record in records if record["logger"] == "engine.loop"]
    assert failed["request_id"] == NAME
    assert "deadline_s of 1e-09 s has passed" in failed["message"]


def test_text_says_the_same_and_keeps_the_same_secrets() -> None:
    _, complaint, _ = life("scripted")
    assert not any(secret in complaint for secret in SECRETS)
    lines = complaint.splitlines()
    assert sum(NAME in line for line in lines) == 8
    assert any(line.endswith(f"has passed [{NAME}]") for line in lines)
    assert "cellserve: stopping; requests have 30 s to finish" in lines


def test_the_engines_process_writes_as_it_is_told_and_knows_the_callers_id() -> None:
    with ServerProcess("--log-format", "json", "die-in-every-step") as server:  # there is no step in it
        server.ready_line()
        assert ask(server.url, {"prompt": [5, 6], "max_tokens": 3, "timeout": 1e-9}).status_code == 504
        server.signal(signal.SIGTERM)
        _, _, complaint = server.ended()
    records = [json.loads(line) for line in complaint.splitlines()]
    [of_engine] = [record for record in records if record["process"] == "engine"]
    assert of_engine["request_id"] == NAME
    assert of_engine["pid"] not in {record["pid"] for record in records if record["process"] == "api"}


# The formatter alone.


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a logger of its own writes as text."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.TextLines())
    logger = logging.getLogger("test.logs")
    logger.addHandler(handler)
    logger.propagate = False
    yield stream
    logger.removeHandler(handler)
    logger.propagate = True


def test_a_line_break_in_a_message_forges_no_line(written: io.StringIO) -> None:
    logging.getLogger("test.logs").warning("fields: %s", "a\n2026-01-01 ERROR cellserve: forged\x1b[2J\u2028")
    assert written.getvalue().count("\n") == 1
    assert "\\n2026-01-01 ERROR" in written.getvalue()
    assert "\x1b" not in written.getvalue()
    assert "\u2028" not in written.getvalue()


def test_a_traceback_is_there_in_both_forms(written: io.StringIO) -> None:
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError:
        logging.getLogger("test.logs").exception("it failed")
        record = logging.LogRecord("a", logging.ERROR, "", 0, "it failed", None, sys.exc_info())
    assert "ZeroDivisionError: by zero" in written.getvalue()
    line = logs.JsonLines("api").format(record)
    assert "\n" not in line
    assert "ZeroDivisionError: by zero" in json.loads(line)["traceback"]


def test_an_error_nobody_handled_is_logged_under_its_request() -> None:
    def prepare(app: Any) -> None:
        @app.get("/fault")
        async def fault() -> None:
            logging.getLogger("cellserve.server").warning("about to fail")
            raise ZeroDivisionError("by zero")

    with live_server(scripted_client(), Settings(access_log=False), prepare=prepare) as server:
        logger, stream = logging.getLogger("cellserve.server"), io.StringIO()
        sink = logging.StreamHandler(stream)
        sink.setFormatter(logs.JsonLines("api"))
        logger.addHandler(sink)
        try:
            assert server.http.get("/fault", headers={"X-Request-Id": NAME}).status_code == 500
        finally:
            logger.removeHandler(sink)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["request_id"] for line in lines] == [NAME, NAME]
    assert "traceback" in lines[1]
