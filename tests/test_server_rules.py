"""Rules of the API's semantics (4.1 to 4.8) that no test of one part holds by itself, over HTTP on a scripted engine.

tests/API_RULES.md names the test of every rule.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import ScriptedExecutor, from_script, scripted_client
from support.sse import post_stream, strict_json
from support.tiny_tokenizer import TinyTokenizer, write_byte_level
from support.toy_server import text as toy_text
from support.toy_server import toy_client, write_toy_tokenizer

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
SMALL = Settings(access_log=False, max_queued_tokens=100)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTokenizer:
    return write_byte_level(tmp_path_factory.mktemp("tiny"), ["Sum", " 4"])


@pytest.fixture
def executor(tiny: TinyTokenizer) -> ScriptedExecutor:
    script = {tuple(b"q"): tiny.ids("Sum", ":", " 4", "2"), tuple(b"eos"): (*tiny.ids("a", "b"), tiny.eos_id)}
    return ScriptedExecutor(from_script(script, then=lambda prompt, generated, seed: 120))


def client_of(executor: ScriptedExecutor, tiny: TinyTokenizer, **info: Any) -> Any:
    known = {"tokenizer_dir": str(tiny.folder), "vocab_size": tiny.vocab_size, "eos_token_ids": (tiny.eos_id,)}
    return scripted_client(executor, **(known | info))


@pytest.fixture
def server(executor: ScriptedExecutor, tiny: TinyTokenizer) -> Iterator[LiveServer]:
    with live_server(client_of(executor, tiny), SMALL) as live:
        yield live
        executor.release()


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = server.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = strict_json(answer.text)
    return whole


def books(server: LiveServer) -> tuple[int, int]:
    """(places taken, prompt tokens queued)."""

    def read() -> tuple[int, int]:
        admission = server.app.state.serving.admission
        return admission.in_use, admission.queued_tokens

    return server.call(read)


# --- 4.1 lengths and echo


@pytest.mark.parametrize("echo", [False, True])
def test_4_1_no_tokens_at_all_take_no_step_of_the_engine(
    server: LiveServer, executor: ScriptedExecutor, echo: bool
) -> None:
    whole = complete(server, prompt="q", max_tokens=0, echo=echo)
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("q" if echo else "", 0)
    assert executor.batches == []


def test_4_1_usage_is_not_changed_by_echo(server: LiveServer) -> None:
    plain, echoed = (complete(server, prompt="q", max_tokens=4, echo=echo)["usage"] for echo in (False, True))
    assert plain["total_tokens"] == echoed["total_tokens"] == 5


def test_4_1_a_chat_without_a_limit_may_fill_the_rest_of_the_context(server: LiveServer) -> None:
    answer = server.http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512


def test_4_1_more_than_20_alternatives_are_a_400_that_names_logprobs(server: LiveServer) -> None:
    for body in ({"prompt": "q", "logprobs": 21}, {"prompt": "q", "prompt_logprobs": 21}):
        answer = server.http.post(PATH, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, list(body)[1])


def test_b08_impossible_tokens_are_strict_json_through_a_real_sampler(tmp_path: Any) -> None:
    with live_server(toy_client(write_toy_tokenizer(tmp_path)), Settings(access_log=False)) as server:
        body = {"prompt": "true false", "max_tokens": 2, "temperature": 1, "top_k": 1, "echo": True, "logprobs": 5}
        bias = {str(token_id): -100 for token_id in range(0, 32, 2)}
        for more in ({}, {"logit_bias": bias}):
            logprobs = complete(server, **body, **more)["choices"][0]["logprobs"]
            first, *values = logprobs["token_logprobs"]
            assert first is None
            assert logprobs["top_logprobs"][0] is None
            assert all(-9999.0 <= value <= 0 for value in values)
            assert len(values) == 9 + 2


def test_4_1_logprobs_are_of_the_model_before_temperature_penalties_and_masks(tmp_path: Any) -> None:
    with live_server(toy_client(write_toy_tokenizer(tmp_path)), Settings(access_log=False)) as server:
        body = {"prompt": "true", "max_tokens": 1, "temperature": 0, "logprobs": 20}
        (plain,) = complete(server, **body)["choices"][0]["logprobs"]["top_logprobs"]
        # The runner-up is drawn instead, and has the value that it had.
        first, second, *_ = plain
        vocabulary = {letter: str(token_id) for token_id, letter in enumerate(map(toy_text, zip(range(31))))}
        for more in (
            {"logit_bias": {vocabulary[first]: -100}},
            {"bad_words": [first]},
            {"allowed_token_ids": [int(vocabulary[second])]},
        ):
            (choice,) = complete(server, **body, **more)["choices"]
            assert choice["text"] == second
            # Not to the last bit: the prompt was there, so its last row runs by itself.
            assert choice["logprobs"]["token_logprobs"] == pytest.approx([plain[second]], abs=1e-4)
            assert choice["logprobs"]["top_logprobs"] == [pytest.approx(plain, abs=1e-4)]


# --- 4.2 prompts


def test_4_2_a_prompt_is_required_and_the_schema_says_so(server: LiveServer) -> None:
    for body in ({}, {"prompt": None}):
        answer = server.http.post(PATH, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    assert "prompt" in schemas["CompletionBody"]["required"]


def test_4_2_results_do_not_depend_on_the_order_of_prompts(server: LiveServer) -> None:
    one, other = (complete(server, prompt=prompts, n=2, seed=3)["choices"] for prompts in (["q", "eos"], ["eos", "q"]))
    assert [choice["text"] for choice in one[:2]] == [choice["text"] for choice in other[2:]]
    assert [choice["text"] for choice in one[2:]] == [choice["text"] for choice in other[:2]]


# --- fields that only the engine obeys


def test_1_3_a_request_of_lower_priority_runs_sooner(executor: ScriptedExecutor, tiny: TinyTokenizer) -> None:
    executor.hold()
    with live_server(client_of(executor, tiny, max_num_seqs=1), SMALL) as server:
        threads = []
        for prompt, priority in ((5, 0), (6, 5), (7, None), (8, -5)):
            body = {"prompt": [[prompt] * 3], "max_tokens": 1, "priority": priority}
            threads.append(threading.Thread(target=complete, args=(server,), kwargs=body))
            threads[-1].start()
            until(lambda: server.call(lambda: server.app.state.serving.client.num_outstanding) == len(threads))
            if prompt == 5:
                executor.wait_held()
        executor.release()
        for thread in threads:
            thread.join()
    assert [batch.chunks[0].tokens[0] for batch in executor.batches] == [5, 8, 7, 6]


def test_1_9_a_salt_finds_nothing_of_another(server: LiveServer) -> None:
    def cached(salt: str | None, path: str = PATH) -> int:
        body: dict[str, Any] = {"prompt": [list(range(20))], "max_tokens": 1}
        if path == CHAT:
            body = {"messages": [{"role": "user", "content": "hello hello"}], "max_tokens": 1}
        answer = server.http.post(path, json=body | {"cache_salt": salt})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(salt) for salt in ("a", "b", None)] == [0, 0, 0]
    assert [cached(salt) for salt in ("a", "b", None)] == [19, 19, 19]
    assert [cached(salt, CHAT) > 0 for salt in ("a", "b", "a")] == [False, False, True]


# --- 4.4 ends


def test_4_4_whatever_ends_a_choice_its_reason_is_one_of_two_words(server: LiveServer, tiny: TinyTokenizer) -> None:
    (colon,) = tiny.ids(":")
    for body, reason, stop_reason in (
        ({"prompt": "eos"}, "stop", None),
        ({"prompt": "q", "stop": "m:"}, "stop", "m:"),
        ({"prompt": "q", "stop_token_ids": [colon]}, "stop", colon),
        ({"prompt": "q", "max_tokens": 2}, "length", None),
        ({"prompt": "q", "max_tokens": 0}, "length", None),
    ):
        (choice,) = complete(server, **body)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop_reason)


def test_4_4_no_stop_strings_is_the_same_as_none(server: LiveServer) -> None:
    texts = {complete(server, prompt="q", max_tokens=4, **body)["choices"][0]["text"] for body in
             ({}, {"stop": None}, {"stop": []})}  # fmt: skip
    assert texts == {"Sum: 42"}


# --- 4.5 streams


def test_4_5_every_index_ends_once_and_in_its_last_chunk(server: LiveServer) -> None:
    chunks = post_stream(server.http, PATH, {"prompt": ["q", "eos"], "n": 2, "seed": 1, "max_tokens": 5})
    by_index: dict[int, list[Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            by_index.setdefault(part["index"], []).append(part)
    assert sorted(by_index) == [0, 1, 2, 3]
    for parts in by_index.values():
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] in ("stop", "length")
        assert all(part["text"] for part in parts[:-1])


def test_4_5_all_chunks_carry_one_id_one_time_one_model_and_the_object_of_a_completion(server: LiveServer) -> None:
    options = {"include_usage": True}
    chunks = post_stream(server.http, PATH, {"prompt": ["q", "eos"], "n": 2, "echo": True, "stream_options": options})
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_4_5_no_byte_leaves_before_admission_and_validation(server: LiveServer, executor: ScriptedExecutor) -> None:
    executor.hold()
    holder = threading.Thread(target=lambda: complete(server, prompt=[[5] * 90], max_tokens=1))
    holder.start()
    executor.wait_held()
    until(lambda: books(server) == (1, 90))
    for body, status in (
        ({"prompt": "q", "temperature": 3}, 400),
        ({"prompt": "q", "model": "other"}, 404),
        ({"prompt": [[5] * 11]}, 429),
        ({"prompt": [[5] * 600]}, 429),
    ):
        answer = server.http.post(PATH, json=body | {"stream": True})
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
        assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
    executor.release()
    holder.join()
    # With room, what is too long for the context is that, and not too much at once.
    answer = server.http.post(PATH, json={"prompt": [[5] * 600], "stream": True})
    assert answer.status_code == 400


# --- 4.8 back-pressure


def test_4_8_a_full_queue_refuses_by_tokens_before_it_tokenises(server: LiveServer, executor: ScriptedExecutor) -> None:
    executor.hold()
    holder = threading.Thread(target=lambda: complete(server, prompt=[[5] * 99], max_tokens=1))
    holder.start()
    executor.wait_held()
    until(lambda: books(server) == (1, 99))
    answer = server.http.post(PATH, json={"prompt": "x" * 6})  # about 3 tokens
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (429, "queue_full", "overloaded_error")
    assert "99 of 100 prompt tokens" in error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert answer.headers["x-should-retry"] == "true"
    assert int(answer.headers["retry-after-ms"]) > 0
    assert server.metric("vllm:admission_rejections_total", reason="queue_full") == 1
    executor.release()
    holder.join()
    assert books(server) == (0, 0)


def test_4_8_an_estimate_is_corrected_when_the_prompt_is_tokenised(
    server: LiveServer, executor: ScriptedExecutor
) -> None:
    # This tokenizer makes a token of each byte: three times the estimate.
    executor.hold()
    holder = threading.Thread(target=lambda: complete(server, prompt="x" * 60, max_tokens=1))
    holder.start()
    executor.wait_held()
    assert books(server) == (1, 60)
    answer = server.http.post(PATH, json={"prompt": "y" * 60})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert books(server) == (1, 60)
    executor.release()
    holder.join()
    answer = server.http.post(PATH, json={"prompt": "y" * 101})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")
    assert answer.headers["x-should-retry"] == "false"
    assert books(server) == (0, 0)


def test_4_8_a_prompt_leaves_the_queue_with_its_first_token_and_its_place_with_the_last(
    server: LiveServer, executor: ScriptedExecutor
) -> None:
    executor.hold()
    chunks: list[Any] = []
    body = {"prompt": [[5] * 50, [6] * 40], "max_tokens": 9}
    reader = threading.Thread(target=lambda: chunks.extend(post_stream(server.http, PATH, body)))
    reader.start()
    until(lambda: server.call(lambda: server.app.state.serving.client.num_outstanding) == 2)
    executor.wait_held()
    assert books(server) == (2, 90)
    executor.release(2)  # the first step may have begun before the second prompt came
    executor.wait_held()
    until(lambda: books(server) == (2, 0))
    executor.release()
    reader.join()
    assert len(chunks) >= 2
    until(lambda: books(server) == (0, 0))


def test_4_8_the_books_balance_with_leavers_errors_and_streams(
    server: LiveServer, executor: ScriptedExecutor, tiny: TinyTokenizer
) -> None:
    for token in (7, 8):
        executor.fail_session([token] * 5)
    rng = random.Random(5)
    kinds: list[tuple[dict[str, Any], float | None]] = []
    for _ in range(60):
        prompt: Any = rng.choice(["q", "x" * rng.randint(1, 50), [[7] * 5], [[9] * 30, [10] * 3], [[8] * 5, [11] * 5]])
        body = {"prompt": prompt, "max_tokens": rng.choice([0, 1, 9]), "n": rng.choice([1, 2]), "seed": 1}
        if rng.random() < 0.2:
            body["timeout"] = 1e-4
        if rng.random() < 0.2:
            body |= {"prompt": [[1000]], "temperature": rng.choice([1, 9])}
        kinds.append((body | {"stream": rng.random() < 0.5}, 0.01 if rng.random() < 0.3 else None))
    statuses: list[int] = []

    def ask(mine: list[tuple[dict[str, Any], float | None]]) -> None:
        for body, patience_s in mine:
            try:
                with httpx.Client(base_url=server.url, trust_env=False, verify=False) as http:
                    timeout = httpx.Timeout(20, read=patience_s or 20)
                    statuses.append(http.post(PATH, json=body, timeout=timeout).status_code)
            except httpx.ReadTimeout:
                statuses.append(499)

    threads = [threading.Thread(target=ask, args=(kinds[i::6],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 60
    assert {200, 400} <= set(statuses)
    until(lambda: books(server) == (0, 0))
    until(lambda: not executor.sessions)
    started = server.metric("cellserve:choices_started_total")
    ended = [
        server.metric("vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "abort", "error")
    ]
    assert sum(ended) == started
    assert server.call(lambda: server.app.state.serving.client.num_outstanding) == 0
