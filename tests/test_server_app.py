"""The app as a whole: its routes, and one error shape whoever raises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI, Query

from engine import errors as engine_errors
from engine.errors import ModelError
from engine.types import GenerationDefaults
from server import errors
from server.serving import Serving
from server.settings import Settings
from support.live_server import LiveServer, live_server
from support.scripted import scripted_client

NAMES = ("acme/tiny", "tiny")


def add_routes(app: FastAPI) -> None:
    @app.get("/refused/{kind}")
    async def refused(kind: str) -> None:
        raise {
            "api": errors.unsupported_parameter("no such thing", "tools"),
            "full": engine_errors.QueueFull("16 of 16 sequences"),
            "long": engine_errors.RequestTooLong(600, 1, 512),
            "step": engine_errors.StepFailed("at 0x7f"),
        }[kind]

    @app.post("/typed")
    async def typed(body: dict[str, int], verbose: bool = Query(False)) -> dict[str, int]:
        return body


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    settings = Settings(served_model_name=NAMES, access_log=False)
    with live_server(scripted_client(), settings, prepare=add_routes) as server:
        yield server


def test_models_are_listed_under_all_their_names(server: LiveServer) -> None:
    first, second = (server.http.get("/v1/models").json() for _ in range(2))
    assert first == second, "created is the time of the load, not of the question"
    assert first["object"] == "list"
    assert [card["id"] for card in first["data"]] == list(NAMES)
    assert first["data"][0] == {
        "id": "acme/tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "cellserve",
        "max_model_len": 512,
        "defaults": {
            "max_tokens": 16,
            **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
        },
        "defaults_of_model": [],
        "limits": {"n": 8, "logprobs": 20, "embedding_inputs": 2048, "body_bytes": 8 * 1024 * 1024},
        "features": {"text": False, "chat": False, "structured_outputs": False, "embeddings": True},
        "embedding": {"pooling": "last", "dimensions": 3, "matryoshka": None},
    }


def test_a_models_card_and_the_start_tell_the_defaults_that_hold(caplog: pytest.LogCaptureFixture) -> None:
    defaults = GenerationDefaults(temperature=0.0, top_k=20)
    caplog.set_level("INFO", "cellserve.server")
    with live_server(scripted_client(defaults=defaults, pooling=None)) as server:
        (card,) = server.http.get("/v1/models").json()["data"]
        assert card["defaults"] == {
            "max_tokens": 16,
            **{"temperature": 0.0, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0},
        }
        assert card["defaults_of_model"] == ["temperature", "top_k"]
        assert card["embedding"] is None
        # They do hold: greedy choices are copies of one decode.
        server.http.post("/v1/completions", json={"prompt": [5], "n": 3, "max_tokens": 1}).raise_for_status()
        assert server.metric("cellserve:engine_generated_tokens_total") == 1
    assert "temperature 0 (the model), top_p 1, top_k 20 (the model)" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_found_by_its_name_slash_and_all(server: LiveServer, name: str) -> None:
    assert server.http.get(f"/v1/models/{name}").json()["id"] == name


def test_an_unknown_model_is_a_404_that_names_the_served_ones(server: LiveServer) -> None:
    answer = server.http.get("/v1/models/gpt-9")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "acme/tiny, tiny" in answer.json()["error"]["message"]


def test_version_is_a_one_liner(server: LiveServer) -> None:
    assert list(server.http.get("/version").json()) == ["version"]


def test_load_counts_what_runs_or_waits(server: LiveServer) -> None:
    assert server.http.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize(("method", "path", "body", "status", "code"), [
    ("GET", "/nowhere", None, 404, "not_found"),
    ("GET", "/live/", None, 404, "not_found"),
    ("GET", "/docs", None, 404, "not_found"),
    ("GET", "/redoc", None, 404, "not_found"),
    ("DELETE", "/v1/models", None, 405, "method_not_allowed"),
    ("POST", "/live", None, 405, "method_not_allowed"),
    ("POST", "/typed", b"{", 400, "invalid_json"),
    ("POST", "/typed", b"\xff\xfe", 400, "invalid_json"),
    ("POST", "/typed", b"", 400, "invalid_value"),
    ("POST", "/typed", b"[]", 400, "invalid_value"),
    ("POST", "/typed", b"[" * 200_000, 400, "invalid_json"),
    ("POST", "/typed", b"9" * 5_000, 400, "invalid_json"),
    ("POST", "/typed", b'{"\\ud800": "x"}', 400, "invalid_value"),
    ("POST", "/typed", b'{"a": "x"}', 400, "invalid_value"),
    ("POST", "/typed?verbose=maybe", b"{}", 400, "invalid_value"),
    ("GET", "/refused/api", None, 400, "unsupported_parameter"),
    ("GET", "/refused/full", None, 429, "queue_full"),
    ("GET", "/refused/long", None, 400, "context_length_exceeded"),
    ("GET", "/refused/step", None, 500, "internal_error"),
])  # fmt: skip
def test_whoever_refuses_the_shape_is_one(
    server: LiveServer, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    answer = server.http.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["X-Request-Id"]
    assert list(answer.json()) == ["error"]
    assert {"message", "type", "param", "code"} <= set(answer.json()["error"])
    assert answer.json()["error"]["code"] == code
    assert "0x7f" not in answer.text


def test_a_405_says_what_is_allowed(server: LiveServer) -> None:
    assert "GET" in server.http.delete("/v1/models").headers["Allow"]


def test_json_is_taken_without_a_type_header(server: LiveServer) -> None:
    assert server.http.post("/v1/completions", content=b'{"prompt": [5], "max_tokens": 1}').status_code == 200


def test_an_engines_refusal_is_counted_and_says_when_to_come_back(server: LiveServer) -> None:
    before = server.metric("vllm:admission_rejections_total", reason="queue_full")
    answer = server.http.get("/refused/full")
    assert int(answer.headers["Retry-After"]) >= 1
    assert server.metric("vllm:admission_rejections_total", reason="queue_full") == before + 1


def test_the_api_document_is_served_without_pages_that_load_from_elsewhere(server: LiveServer) -> None:
    document = server.http.get("/openapi.json").json()
    assert {"/v1/models", "/v1/models/{model}", "/health"} <= set(document["paths"])
    assert "http" not in str(document["info"])


def test_admission_holds_what_runs_and_what_waits(server: LiveServer) -> None:
    serving: Serving = server.app.state.serving
    assert serving.admission.capacity == 16
    assert serving.served_names == NAMES


def test_a_tokenizer_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    client = scripted_client(tokenizer_dir=str(tmp_path))
    with (
        live_server(client, Settings(access_log=False), is_ready=False) as server,
        pytest.raises(ModelError, match="the tokenizer of scripted cannot be used"),
    ):
        server.wait_ready()


def test_server_info_tells_how_it_was_set_up_and_no_secret(tmp_path: Path) -> None:
    settings = Settings(api_key="hush", access_log=False, max_waiting=7)
    with live_server(scripted_client(tokenizer_dir=None), settings) as server:
        assert server.http.get("/server_info").status_code == 401
        answer = server.http.get("/server_info", headers={"X-Api-Key": "hush"})
    info = answer.json()
    assert info["config"]["max_waiting"] == 7
    assert info["engine"]["architecture"] == "ScriptedForCausalLM"
    assert {"cellserve", "python", "torch"} <= set(info["versions"])
    assert info["has_api_keys"] is True
    assert info["admission"] == {"sequences": 0, "max_sequences": 16, "queued_tokens": 0, "max_queued_tokens": 16384}
    assert "hush" not in answer.text
    assert "tokenizer_dir" not in answer.text


def test_ping_and_load_are_one_liners(server: LiveServer) -> None:
    assert server.http.get("/ping").json() == {"status": "ok"}
    assert server.http.get("/load").json() == {"server_load": 0}


def test_a_405_names_every_method_of_the_path(server: LiveServer) -> None:
    assert server.http.options("/health").headers["Allow"] == "GET, HEAD"
    assert server.http.get("/v1/completions").headers["Allow"] == "POST"


def test_the_openapi_document_promises_the_one_error_shape_and_no_422(server: LiveServer) -> None:
    document = server.http.get("/openapi.json").json()
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
            content = operation["responses"]["default"]["content"]["application/json"]
            assert content["schema"]["$ref"].endswith("/ErrorAnswer")
