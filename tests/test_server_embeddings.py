"""POST /v1/embeddings and LLM.embed: forms, encodings, limits, ends, and the books, on a scripted engine."""

from __future__ import annotations

import base64
import math
import struct
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from engine.config import DEFAULT_MODEL_NAME
from server.llm import LLM
from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import ScriptedExecutor, scripted_client, scripted_hidden
from support.sse import strict_json
from support.tiny_tokenizer import TinyTokenizer, write_byte_level

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTokenizer:
    return write_byte_level(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


def client_of(executor: ScriptedExecutor, tiny: TinyTokenizer, **info: Any) -> Any:
    return scripted_client(executor, **({"tokenizer_dir": str(tiny.folder), "vocab_size": tiny.vocab_size} | info))


@pytest.fixture
def server(executor: ScriptedExecutor, tiny: TinyTokenizer) -> Iterator[LiveServer]:
    with live_server(client_of(executor, tiny)) as live:
        yield live
        executor.release()


def of_last(token: int, position: int) -> list[float]:
    values = scripted_hidden(token, position)
    length = math.hypot(*values)
    return [value / length for value in values]


def embed(server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = server.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    written: dict[str, Any] = strict_json(answer.text)
    return written


def refused(server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = server.http.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def in_use(server: LiveServer) -> tuple[int, int]:
    def read() -> tuple[int, int]:
        admission = server.app.state.serving.admission
        return admission.in_use, admission.queued_tokens

    return server.call(read)


@pytest.mark.parametrize("form", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_the_four_forms_of_an_input_mean_the_same(server: LiveServer, form: Any) -> None:
    answer = embed(server, input=form)
    assert answer["object"] == "list"
    assert answer["model"] == DEFAULT_MODEL_NAME
    assert answer["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
    (entry,) = answer["data"]
    assert (entry["object"], entry["index"]) == ("embedding", 0)
    assert entry["embedding"] == pytest.approx(of_last(105, 1), abs=1e-6)


def test_base64_holds_the_same_float32_numbers(server: LiveServer) -> None:
    plain = embed(server, input=["a", "bcd"], encoding_format="float")["data"]
    packed = embed(server, input=["a", "bcd"], encoding_format="base64")["data"]
    for index, (entry, other) in enumerate(zip(plain, packed, strict=True)):
        assert entry["index"] == other["index"] == index
        assert list(struct.unpack("<3f", base64.b64decode(other["embedding"]))) == entry["embedding"]


def test_more_inputs_than_places_are_answered_in_order_and_a_prefix_is_used_again(server: LiveServer) -> None:
    inputs = [[7, 8, 9, token] for token in range(250)]
    answer = embed(server, input=inputs)
    assert [entry["index"] for entry in answer["data"]] == list(range(250))
    for token, entry in enumerate(answer["data"]):
        assert entry["embedding"] == pytest.approx(of_last(token, 3), abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == 1000
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert in_use(server) == (0, 0)
    assert server.metric("vllm:request_success_total", finished_reason="stop") == 250
    assert server.metric("cellserve:choices_started_total") == 250
    assert server.metric("vllm:prompt_tokens_total") == 1000


def test_a_mean_is_over_all_tokens_and_reuses_nothing(executor: ScriptedExecutor, tiny: TinyTokenizer) -> None:
    with live_server(client_of(executor, tiny, pooling="mean")) as server:
        for _ in range(2):
            answer = embed(server, input=[list(range(40, 60))])
            sums = [sum(column) for column in zip(*(scripted_hidden(40 + i, i) for i in range(20)), strict=True)]
            length = math.hypot(*sums)
            assert answer["data"][0]["embedding"] == pytest.approx([value / length for value in sums], abs=1e-6)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_openapi_document_promises_no_dimensions_that_only_some_models_have(server: LiveServer) -> None:
    body = server.http.get("/openapi.json").json()["components"]["schemas"]["EmbeddingBody"]
    assert body["properties"]["dimensions"]["type"] == "null"


def test_dimensions_are_cut_only_where_the_model_was_trained_for_it(
    executor: ScriptedExecutor, tiny: TinyTokenizer, server: LiveServer
) -> None:
    assert len(embed(server, input="hi", dimensions=3)["data"][0]["embedding"]) == 3
    error = refused(server, input="hi", dimensions=2)
    assert (error["code"], error["param"]) == ("unsupported_parameter", "dimensions")
    for sizes, good, bad in (((), 1, 4), ((2,), 2, 1)):
        with live_server(client_of(executor, tiny, matryoshka=sizes)) as cutting:
            (entry,) = embed(cutting, input="hi", dimensions=good)["data"]
            begin = of_last(105, 1)[:good]
            assert entry["embedding"] == pytest.approx([v / math.hypot(*begin) for v in begin], abs=1e-6)
            error = refused(cutting, input="hi", dimensions=bad)
            assert (error["code"], error["param"]) == ("invalid_value", "dimensions")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_field", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": [[5], []]}, "invalid_value", "input"),
        ({"input": ["a", 5]}, "invalid_value", "input"),
        ({"input": [[5], [100_000]]}, "invalid_value", "input"),
        ({"input": [[5]] * 2049}, "invalid_value", "input"),
        ({"input": [[5], [6] * 513]}, "context_length_exceeded", "input"),
        ({"input": "x" * 7000}, "context_length_exceeded", "input"),
        ({"input": "hi", "encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": "hi", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "hi", "normalize": False}, "unsupported_parameter", "normalize"),
    ],
)
def test_what_cannot_be_is_a_400_by_name_before_anything_is_admitted(
    server: LiveServer, executor: ScriptedExecutor, body: dict[str, Any], code: str, param: str
) -> None:
    error = refused(server, **body)
    assert (error["code"], error["param"]) == (code, param)
    assert executor.opened == 0
    assert in_use(server) == (0, 0)


def test_a_prompt_may_fill_the_context_or_be_cut_to_it(server: LiveServer) -> None:
    assert embed(server, input=[[5] * 512])["usage"]["prompt_tokens"] == 512
    for keep, side, tokens, last in ((-1, None, 512, 9), (4, None, 4, 9), (4, "right", 4, 5)):
        answer = embed(server, input=[[5] * 600 + [9]], truncate_prompt_tokens=keep, truncation_side=side)
        assert answer["usage"]["prompt_tokens"] == tokens
        assert answer["data"][0]["embedding"] == pytest.approx(of_last(last, tokens - 1), abs=1e-6)


def test_an_unknown_model_is_a_404_and_a_model_that_cannot_says_why_in_a_400(
    executor: ScriptedExecutor, tiny: TinyTokenizer, server: LiveServer
) -> None:
    answer = server.http.post(PATH, json={"input": "hi", "model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    with live_server(client_of(executor, tiny, pooling=None, no_embeddings="it pools by cls_token")) as without:
        error = refused(without, input="hi")
        assert (error["code"], error["param"]) == ("embeddings_not_supported", "model")
        assert "it pools by cls_token" in error["message"]
        assert without.http.post("/v1/completions", json={"prompt": "hi"}).status_code == 200


def test_a_model_without_a_tokenizer_takes_ids() -> None:
    with live_server(scripted_client()) as server:
        assert embed(server, input=[5, 6])["data"][0]["embedding"] == pytest.approx(of_last(6, 1), abs=1e-6)
        assert refused(server, input="hi")["param"] == "input"


def test_unknown_fields_pass_and_are_reported(server: LiveServer) -> None:
    answer = server.http.post(PATH, json={"input": "hi", "foo": 1, "normalize": True, "user": "me"})
    assert (answer.status_code, answer.headers["x-ignored-params"]) == (200, "foo")


def test_a_client_that_leaves_takes_its_inputs_with_it(server: LiveServer, executor: ScriptedExecutor) -> None:
    executor.hold()
    with httpx.Client(base_url=server.url, trust_env=False) as leaver, pytest.raises(httpx.ReadTimeout):
        leaver.post(PATH, json={"input": [[5 + i] for i in range(50)]}, timeout=httpx.Timeout(5, read=0.3))
    executor.wait_held()
    until(lambda: in_use(server) == (0, 0))
    executor.release()
    until(lambda: not executor.sessions)
    until(lambda: server.call(lambda: server.app.state.serving.client.num_outstanding) == 0)
    started = server.metric("cellserve:choices_started_total")
    until(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == started)
    assert started <= 8


def test_it_can_be_cancelled_by_its_id(server: LiveServer, executor: ScriptedExecutor) -> None:
    executor.hold()
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(
            server.http.post(PATH, json={"input": [[5 + i] for i in range(50)]}, headers={"X-Request-Id": "mine"})
        )

    thread = threading.Thread(target=ask)
    thread.start()
    executor.wait_held()
    assert server.http.delete("/v1/requests/mine").status_code == 200
    executor.release()
    thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "request_cancelled")
    assert in_use(server) == (0, 0)
    assert server.http.delete("/v1/requests/mine").status_code == 404


def test_a_failure_of_one_input_fails_the_request_and_gives_everything_back(
    server: LiveServer, executor: ScriptedExecutor
) -> None:
    executor.fail_session((6,))
    answer = server.http.post(PATH, json={"input": [[5], [6], [7]]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    until(lambda: not executor.sessions)
    assert in_use(server) == (0, 0)
    assert len(embed(server, input=[[5], [7]])["data"]) == 2


def test_a_deadline_counts_from_the_requests_arrival(executor: ScriptedExecutor, tiny: TinyTokenizer) -> None:
    with live_server(client_of(executor, tiny, max_num_seqs=1)) as server:
        answer = server.http.post(PATH, json={"input": [[5 + i] for i in range(200)], "timeout": 1e-4})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert in_use(server) == (0, 0)


def test_inputs_beyond_the_queue_are_refused_by_their_tokens(executor: ScriptedExecutor, tiny: TinyTokenizer) -> None:
    with live_server(client_of(executor, tiny), Settings(access_log=False, max_queued_tokens=100)) as server:
        assert refused(server, input=[[5] * 51, [6] * 50])["code"] == "request_too_large"
        assert len(embed(server, input=[[5] * 50, [6] * 50])["data"]) == 2


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}])
def test_the_openai_client_reads_it(server: LiveServer, form: dict[str, Any]) -> None:
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="x",
        # Without a format it asks for base64, which it decodes behind its own check of types.
        _strict_response_validation=bool(form),
        http_client=httpx.Client(trust_env=False),
    ) as client:
        answer = client.embeddings.create(model=DEFAULT_MODEL_NAME, input=["a", "hi"], **form)
        assert answer.data[1].embedding == pytest.approx(of_last(105, 1), abs=1e-6)
        assert answer.usage.total_tokens == 3


def test_llm_embeds_as_the_route_does(executor: ScriptedExecutor, tiny: TinyTokenizer) -> None:
    with LLM.from_client(client_of(executor, tiny, matryoshka=(), max_num_seqs=2, max_waiting=1)) as llm:
        first, second = llm.embed(["hi", "a"])
        assert (first.input, first.input_token_ids) == ("hi", (104, 105))
        assert first.vector == pytest.approx(of_last(105, 1), abs=1e-6)
        assert second.vector == pytest.approx(of_last(97, 0), abs=1e-6)
        assert len(llm.embed([[5, i] for i in range(20)])) == 20
        assert llm.embed("hi", dimensions=1)[0].vector == (1.0,)
        for fields in ({"dimensions": 9}, {"encoding_format": "base64"}, {"dimension": 2}):
            with pytest.raises(ValueError, match=next(iter(fields))):
                llm.embed("hi", **fields)
        executor.fail_session((9,))
        with pytest.raises(RuntimeError, match="failed to answer"):
            llm.embed([[9]])
        assert llm.generate([[5, 6]], max_tokens=1)[0].choices[0].token_ids == (7,)
