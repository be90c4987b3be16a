import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine.config import DEFAULT_MODEL_NAME
from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import Answer, ScriptedExecutor, count_up, from_script, scripted_client
from support.sse import events, joined_choices, post_stream, strict_json, without_cached
from support.tiny_tokenizer import BOS, EOS, TinyTokenizer, write_byte_level

WORDS = ["Sum", " 4", "END", " Lisbon", " is", "ND"]
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTokenizer:
    return write_byte_level(tmp_path_factory.mktemp("tiny"), WORDS)


def seeded(tiny: TinyTokenizer) -> Answer:
    """Scripts by prompt; a prompt "*" answers with letters that depend on the seed."""
    smile = tiny.byte(0xF0, 0x9F, 0x98, 0x8A)
    script = from_script(
        {
            tuple(b"q"): tiny.ids("Sum", ":", " 4", "2", "\n", "E", "ND", "x"),
            tuple(b"lisbon"): tiny.ids(" Lisbon", " is", "!"),
            tuple(b"eos"): tiny.ids("a", "b", EOS),
            tuple(b"smile"): smile + tiny.ids("z"),
            tuple(b"half"): (*smile[:3], tiny.eos_id),
            tuple(b"ab"): tiny.byte(0xE3, 0x81, 0x8A) + tiny.ids("z"),
        },
        then=lambda prompt, generated, seed: 97 + (seed + len(generated)) % 26 if prompt == (42,) else 120,
    )
    return script


@pytest.fixture(scope="module")
def executor(tiny: TinyTokenizer) -> ScriptedExecutor:
    return ScriptedExecutor(seeded(tiny))


@pytest.fixture(scope="module")
def server(tiny: TinyTokenizer, executor: ScriptedExecutor) -> Iterator[LiveServer]:
    client = scripted_client(
        executor,
        tokenizer_dir=str(tiny.folder),
        vocab_size=tiny.vocab_size,
        eos_token_ids=(tiny.eos_id,),
        max_model_len=2048,
    )
    with live_server(client) as live:
        yield live


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    """The whole answer; the same request streamed must say the same."""
    answer = server.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = strict_json(answer.text)
    if "prompt_logprobs" not in body:
        options = {"include_usage": True}
        *chunks, last = post_stream(server.http, PATH, body | {"stream_options": options})
        assert last["choices"] == []
        assert without_cached(last["usage"]) == without_cached(whole["usage"])
        streamed = joined_choices(chunks)
        for choice in whole["choices"]:
            for key, value in streamed[choice["index"]].items():
                assert choice[key] == value, key
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in [*chunks, last]}) == 1
        assert all(chunk["usage"] is None for chunk in chunks)
    return whole


def choice_of(server: LiveServer, **body: Any) -> dict[str, Any]:
    (choice,) = complete(server, **body)["choices"]
    return choice


def refused(server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = server.http.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_4_1_sixteen_tokens_are_the_default_also_for_null(server: LiveServer) -> None:
    for body in ({}, {"max_tokens": None}):
        whole = complete(server, prompt="p", **body)
        assert whole["usage"]["completion_tokens"] == 16
        assert whole["choices"][0]["finish_reason"] == "length"


def test_4_1_no_tokens_at_all_is_an_answer_and_bills_nothing(server: LiveServer) -> None:
    for echo, text in ((False, ""), (True, "prompt")):
        whole = complete(server, prompt="prompt", max_tokens=0, echo=echo)
        assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (text, "length")
        assert whole["usage"]["completion_tokens"] == 0
        assert whole["usage"]["prompt_tokens"] == 6


def test_4_1_echo_with_logprobs_scores_the_prompt(server: LiveServer) -> None:
    logprobs = choice_of(server, prompt="abc", max_tokens=1, echo=True, logprobs=1)["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "x"]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert logprobs["top_logprobs"] == [None, {"b": -1.0}, {"c": -1.0}, {"x": -1.0}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]


def test_4_1_scoring_without_an_answer_has_the_prompts_entries(server: LiveServer) -> None:
    logprobs = choice_of(server, prompt=[[97, 98]], max_tokens=0, echo=True, logprobs=0)["logprobs"]
    assert logprobs["token_logprobs"] == [None, -1.0]
    assert logprobs["top_logprobs"] == [None, {"b": -1.0}]


def test_lm_eval_finds_one_generated_entry_even_when_it_ends_the_text(server: LiveServer, tiny: TinyTokenizer) -> None:
    prompt = [*b"eos", *b"ab"]
    choice = choice_of(server, prompt=[prompt], max_tokens=1, echo=True, logprobs=1, temperature=0)
    assert len(choice["logprobs"]["token_logprobs"]) == len(prompt) + 1
    for value, top in zip(
        choice["logprobs"]["token_logprobs"][1:], choice["logprobs"]["top_logprobs"][1:], strict=True
    ):
        assert value == max(top.values())


def test_4_1_echo_is_the_callers_own_text_or_the_decoded_ids(server: LiveServer, tiny: TinyTokenizer) -> None:
    text = f"é {EOS}"
    assert choice_of(server, prompt=text, max_tokens=1, echo=True)["text"] == text + "x"
    ids = [*"é".encode(), tiny.eos_id]
    assert choice_of(server, prompt=ids, max_tokens=1, echo=True)["text"] == "éx"
    assert choice_of(server, prompt=ids, max_tokens=1, echo=True, skip_special_tokens=False)["text"] == f"é{EOS}x"


def test_4_1_streamed_echo_is_one_first_chunk_for_each_choice(server: LiveServer) -> None:
    chunks = post_stream(server.http, PATH, {"prompt": "abc", "echo": True, "n": 2, "max_tokens": 1, "logprobs": 1})
    for index in range(2):
        first, *rest = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert first["text"] == "abc"
        assert first["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
        assert "".join(part["text"] for part in rest) == "x"


def test_4_1_logprobs_zero_names_the_drawn_token_alone(server: LiveServer) -> None:
    logprobs = choice_of(server, prompt="p", max_tokens=2, logprobs=0)["logprobs"]
    assert logprobs["top_logprobs"] == [{"x": -1.0}, {"x": -1.0}]
    assert choice_of(server, prompt="p", max_tokens=1)["logprobs"] is None


def test_b07_offsets_are_code_points_from_the_beginning_of_the_prompt(server: LiveServer) -> None:
    for echo in (False, True):
        choice = choice_of(server, prompt="ab", max_tokens=4, logprobs=1, echo=echo)
        assert choice["text"].endswith("おz")
        assert choice["logprobs"]["text_offset"][-4:] == [2, 2, 2, 3]
        assert choice["logprobs"]["tokens"][-4:] == [r"bytes:\xe3", r"bytes:\x81", r"bytes:\x8a", "z"]


def test_4_1_one_entry_a_counted_token_whatever_ended_the_text(server: LiveServer, tiny: TinyTokenizer) -> None:
    for body, ids in (
        ({"prompt": "q", "stop": ["\nEND"]}, tiny.ids("Sum", ":", " 4", "2", "\n", "E", "ND")),
        ({"prompt": "eos"}, tiny.ids("a", "b", EOS)),
        ({"prompt": "q", "stop_token_ids": list(tiny.ids(":"))}, tiny.ids("Sum", ":")),
        ({"prompt": "q", "max_tokens": 2}, tiny.ids("Sum", ":")),
    ):
        whole = complete(server, logprobs=1, return_token_ids=True, **body)
        (choice,) = whole["choices"]
        assert tuple(choice["token_ids"]) == ids
        assert whole["usage"]["completion_tokens"] == len(ids)
        assert {len(values) for values in choice["logprobs"].values()} == {len(ids)}


def test_4_2_index_is_prompt_times_n_plus_choice(server: LiveServer) -> None:
    whole = complete(server, prompt=["q", "eos", "lisbon"], n=2, max_tokens=2)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3, 4, 5]
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["Sum:", "Sum:", "ab", "ab", " Lisbon is", " Lisbon is"]
    assert whole["usage"]["prompt_tokens"] == 1 + 3 + 6
    assert whole["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("prompt", ["q", ["q"], [113], [[113]]])
def test_4_2_the_four_forms_of_a_prompt_mean_the_same(server: LiveServer, prompt: Any) -> None:
    assert choice_of(server, prompt=prompt, max_tokens=1)["text"] == "Sum"


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [[5], []], None, [100_000], [1, "a"], [True]])
def test_4_2_an_impossible_prompt_is_refused_before_anything_is_admitted(
    server: LiveServer, executor: ScriptedExecutor, prompt: Any
) -> None:
    opened = executor.opened
    assert refused(server, prompt=prompt)["param"] == "prompt"
    assert refused(server, prompt=prompt, stream=True)["param"] == "prompt"
    assert executor.opened == opened


def test_4_2_one_bad_prompt_of_a_list_refuses_all(server: LiveServer, executor: ScriptedExecutor) -> None:
    opened = executor.opened
    assert refused(server, prompt=[[5], [100_000]])["param"] == "prompt"
    assert refused(server, prompt=[[5], [5] * 2000], max_tokens=100)["code"] == "context_length_exceeded"
    assert executor.opened == opened
    assert server.call(lambda: server.app.state.serving.admission.in_use) == 0


def test_4_2_n_beyond_the_server_is_a_400_for_a_retry_cannot_help(server: LiveServer) -> None:
    assert refused(server, prompt="p", n=9)["code"] == "request_too_large"
    assert refused(server, prompt="p", n=20_000)["code"] == "request_too_large"


def test_b10_choices_of_one_seed_differ_and_come_again(server: LiveServer) -> None:
    body = {"prompt": "*", "n": 4, "temperature": 1, "max_tokens": 8}
    first, again, other = ([c["text"] for c in complete(server, **body, seed=s)["choices"]] for s in (7, 7, 8))
    assert len(set(first)) == 4
    assert first == again
    assert first != other


def test_4_2_every_prompt_of_a_list_draws_from_the_same_seeds(server: LiveServer) -> None:
    both = complete(server, prompt=["*", "*"], n=2, seed=7, temperature=1, max_tokens=8)["choices"]
    texts = [choice["text"] for choice in both]
    assert texts[:2] == texts[2:]
    alone = complete(server, prompt="*", n=2, seed=7, temperature=1, max_tokens=8)["choices"]
    assert [choice["text"] for choice in alone] == texts[:2]


def test_4_2_best_of_that_asks_for_no_more_than_n_is_n(server: LiveServer) -> None:
    for best_of in (None, 1, 2):
        assert len(complete(server, prompt="q", n=2, best_of=best_of, max_tokens=1)["choices"]) == 2


def test_4_2_n_at_temperature_zero_are_equal_choices_of_one_decode(
    server: LiveServer, executor: ScriptedExecutor
) -> None:
    opened = executor.opened
    body = {"prompt": ["q", "eos"], "n": 3, "temperature": 0, "max_tokens": 4, "logprobs": 1, "prompt_logprobs": 0}
    whole = complete(server, **body)
    assert [choice["text"] for choice in whole["choices"]] == ["Sum: 42"] * 3 + ["ab"] * 3
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert whole["usage"]["completion_tokens"] == 3 * (4 + 3)
    assert executor.opened == opened + 2
    stopped = complete(server, prompt="q", n=3, temperature=0, stop=" 4", echo=True)
    assert [choice["text"] for choice in stopped["choices"]] == ["qSum:"] * 3


def test_4_4_a_stop_string_never_begins_in_the_prompt(server: LiveServer) -> None:
    for echo, text in ((False, "xxx"), (True, "zbxxx")):
        choice = choice_of(server, prompt="zb", stop=["bx"], max_tokens=3, echo=echo)
        assert (choice["text"], choice["finish_reason"]) == (text, "length")


def test_4_6_the_prompts_tokens_are_those_the_model_saw(tmp_path: Path) -> None:
    tiny = write_byte_level(tmp_path, adds_bos=True)
    executor = ScriptedExecutor(lambda prompt, generated, seed: 120)
    info = {"tokenizer_dir": str(tiny.folder), "vocab_size": tiny.vocab_size, "eos_token_ids": (tiny.eos_id,)}
    (bos,) = tiny.ids(BOS)
    with live_server(scripted_client(executor, **info)) as server:
        for prompt, fields, ids in (
            ("ab", {}, [bos, 97, 98]),
            (f"{BOS}ab", {}, [bos, 97, 98]),
            ("ab", {"add_special_tokens": False}, [97, 98]),
            ("", {}, [bos]),
            (f"a{EOS}", {}, [bos, 97, tiny.eos_id]),
            ([97, 98], {}, [97, 98]),
            ([bos, bos], {}, [bos, bos]),
        ):
            whole = complete(server, prompt=prompt, max_tokens=1, return_token_ids=True, **fields)
            assert whole["choices"][0]["prompt_token_ids"] == ids, prompt
            assert whole["usage"]["prompt_tokens"] == len(ids)


def test_4_9_created_is_the_requests_time_in_whole_seconds(server: LiveServer) -> None:
    before = int(time.time())
    created = complete(server, prompt="p", max_tokens=1)["created"]
    assert isinstance(created, int)
    assert before <= created <= time.time()


def test_4_4_end_of_text_is_counted_not_shown_and_no_reason_of_the_callers(server: LiveServer) -> None:
    whole = complete(server, prompt="eos")
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", None)
    assert whole["usage"]["completion_tokens"] == 3
    assert choice_of(server, prompt="eos", skip_special_tokens=False)["text"] == f"ab{EOS}"


def test_4_4_ignored_end_of_text_is_an_ordinary_token(server: LiveServer) -> None:
    choice = choice_of(server, prompt="eos", ignore_eos=True, max_tokens=5)
    assert (choice["text"], choice["finish_reason"]) == ("abxx", "length")
    assert choice_of(server, prompt="eos", ignore_eos=True, stop="bx")["text"] == "a"


def test_4_4_a_stop_token_is_named_and_not_shown(server: LiveServer, tiny: TinyTokenizer) -> None:
    (colon,) = tiny.ids(":")
    choice = choice_of(server, prompt="q", stop_token_ids=[colon])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Sum", "stop", colon)
    shown = choice_of(server, prompt="q", stop_token_ids=[colon], include_stop_str_in_output=True)
    assert shown["text"] == "Sum:"
    assert choice_of(server, prompt="q", stop_token_ids=[colon], skip_special_tokens=False)["text"] == "Sum"


def test_b01_b02_a_stop_string_ends_the_text_before_the_match(server: LiveServer) -> None:
    whole = complete(server, prompt="q", max_tokens=8, stop=["\nEND"])
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Sum: 42", "stop", "\nEND")
    assert whole["usage"]["completion_tokens"] == 7
    assert choice_of(server, prompt="lisbon", stop=["sb", "Lis"])["text"] == " "
    assert choice_of(server, prompt="lisbon", stop="Lis", include_stop_str_in_output=True)["text"] == " Lis"
    assert choice_of(server, prompt="lisbon", stop=["never"], max_tokens=3)["text"] == " Lisbon is!"


def test_4_4_a_stop_string_wins_over_the_length(server: LiveServer) -> None:
    assert choice_of(server, prompt="lisbon", stop=["is"], max_tokens=1)["finish_reason"] == "stop"


def test_4_4_stop_strings_are_not_looked_for_before_min_tokens(server: LiveServer) -> None:
    choice = choice_of(server, prompt="p", stop="x", min_tokens=3)
    assert (choice["text"], choice["finish_reason"]) == ("xxx", "stop")


def test_a_stop_string_ends_the_engines_work_too(server: LiveServer, executor: ScriptedExecutor) -> None:
    assert choice_of(server, prompt="p", stop="xxx", max_tokens=2000)["text"] == ""
    until(lambda: not executor.sessions)
    assert executor.session_cells == 0


def test_a_stop_string_ends_the_work_on_its_own_choice_and_not_on_the_others(tiny: TinyTokenizer) -> None:
    # The first draw's seed is the choice's: choice 0 says "a" and stops, choice 1 goes on.
    executor = ScriptedExecutor(lambda prompt, generated, seed: 97 + seed)
    info = {"tokenizer_dir": str(tiny.folder), "vocab_size": tiny.vocab_size, "eos_token_ids": ()}
    executor.release(4)
    with live_server(scripted_client(executor, **info)) as server:
        answers: list[dict[str, Any]] = []
        body = {"prompt": "p", "n": 2, "seed": 0, "stop": "aaa", "max_tokens": 40}
        thread = threading.Thread(target=lambda: answers.append(server.http.post(PATH, json=body).json()))
        thread.start()
        until(lambda: server.metric("vllm:request_success_total", finished_reason="stop") == 1)
        executor.wait_held()
        steps = len(executor.batches)
        executor.release()
        thread.join()
    assert [choice["text"] for choice in answers[0]["choices"]] == ["", "b" * 40]
    assert {len(batch.chunks) for batch in executor.batches[steps:]} == {1}


def test_4_5_half_characters_never_leave_alone(server: LiveServer) -> None:
    assert choice_of(server, prompt="smile", max_tokens=5)["text"] == "😊z"
    assert choice_of(server, prompt="half")["text"] == "\ufffd"


def test_b36_one_usage_chunk_behind_all_ends_and_none_unless_asked(server: LiveServer) -> None:
    body = {"prompt": "smile", "n": 3, "max_tokens": 5}
    chunks = post_stream(server.http, PATH, body | {"stream_options": {"include_usage": True}})
    assert [bool(chunk["usage"]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 15
    assert all("usage" not in chunk for chunk in post_stream(server.http, PATH, body))


def test_continuous_usage_counts_in_every_chunk(server: LiveServer) -> None:
    options = {"continuous_usage_stats": True}
    chunks = post_stream(server.http, PATH, {"prompt": "q", "max_tokens": 5, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert all(chunk["usage"]["total_tokens"] == chunk["usage"]["completion_tokens"] + 1 for chunk in chunks)


def test_what_was_not_asked_for_is_null_in_a_whole_answer(server: LiveServer) -> None:
    choice = choice_of(server, prompt="q", max_tokens=1)
    assert {choice[name] for name in ("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids")} == {None}


def test_an_echoed_prompts_chunk_counts_no_token_that_comes_behind_it(server: LiveServer) -> None:
    body = {"prompt": "q", "echo": True, "max_tokens": 3, "stream_options": {"continuous_usage_stats": True}}
    counts = [chunk["usage"]["completion_tokens"] for chunk in post_stream(server.http, PATH, body)]
    assert counts[0] == 0
    assert counts[-1] == 3
    assert len(set(counts)) == len(counts)


def test_token_ids_are_returned_when_asked(server: LiveServer, tiny: TinyTokenizer) -> None:
    choice = choice_of(server, prompt="q", max_tokens=2, return_token_ids=True)
    assert choice["prompt_token_ids"] == [113]
    assert tuple(choice["token_ids"]) == tiny.ids("Sum", ":")
    chunks = post_stream(server.http, PATH, {"prompt": "q", "max_tokens": 2, "return_token_ids": True})
    assert [c["choices"][0]["prompt_token_ids"] for c in chunks] == [[113]] + [None] * (len(chunks) - 1)
    named = choice_of(server, prompt="q", max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)
    assert named["logprobs"]["tokens"] == [f"token_id:{tiny.ids('Sum')[0]}"]


def test_prompt_logprobs_have_an_entry_a_token_with_its_own_id(server: LiveServer) -> None:
    choice = choice_of(server, prompt="ab", max_tokens=1, prompt_logprobs=1)
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}]


def test_4_6_a_hopeless_prompt_is_refused_unencoded_with_the_codes_numbers(server: LiveServer) -> None:
    error = refused(server, prompt="x" * (12 * 2048 + 1))
    assert (error["code"], error["n_ctx"]) == ("context_length_exceeded", 2048)


def test_b14_the_contexts_border_is_exact(server: LiveServer) -> None:
    assert refused(server, prompt="x" * 8, max_tokens=2041)["n_prompt_tokens"] == 8
    assert complete(server, prompt="x" * 2047)["usage"]["completion_tokens"] == 1
    assert refused(server, prompt="x" * 2048)["code"] == "context_length_exceeded"


def test_4_7_unknown_fields_pass_and_are_reported(server: LiveServer) -> None:
    body = {"prompt": "p", "max_tokens": 1, "foo": 1, "suffix": None}
    assert server.http.post(PATH, json=body).headers["x-ignored-params"] == "foo"
    assert server.http.post(PATH, json=body | {"stream": True}).headers["x-ignored-params"] == "foo"


@pytest.mark.parametrize("content_type", [None, "application/json", "application/json; charset=utf-8"])
def test_4_7_json_is_taken_without_a_content_type(server: LiveServer, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = server.http.post(PATH, content=b'{"prompt": "p", "max_tokens": 1}', headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"nul", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'])
def test_4_7_what_is_no_json_object_is_a_400(server: LiveServer, content: bytes) -> None:
    answer = server.http.post(PATH, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_headers_of_a_stream_keep_proxies_from_buffering_it(server: LiveServer) -> None:
    with server.http.stream("POST", PATH, json={"prompt": "p", "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-length" not in answer.headers
        (first, *_) = list(events(answer.iter_lines()))
    assert first["id"].startswith("cmpl-")
    assert len(first["id"]) == len("cmpl-") + 32


def test_4_2_best_of_answers_with_the_likeliest_and_bills_all(tiny: TinyTokenizer) -> None:
    executor = ScriptedExecutor(lambda prompt, generated, seed: 97 + seed)
    likelihood = {97: -3.0, 98: -1.0, 99: -2.0}
    executor.logprob_of = lambda token: likelihood[token]
    info = {"tokenizer_dir": str(tiny.folder), "vocab_size": tiny.vocab_size, "eos_token_ids": ()}
    with live_server(scripted_client(executor, **info)) as server:
        body = {"prompt": ["p", "r"], "best_of": 3, "n": 2, "seed": 0, "max_tokens": 2}
        whole = server.http.post(PATH, json=body).json()
        assert [choice["text"] for choice in whole["choices"]] == ["bb", "cc"] * 2
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
        assert {choice["logprobs"] for choice in whole["choices"]} == {None}
        assert whole["usage"]["completion_tokens"] == 12
        echoed = server.http.post(PATH, json={**body, "echo": True, "logprobs": 0}).json()["choices"]
        assert [choice["text"] for choice in echoed] == ["pbb", "pcc", "rbb", "rcc"]
        assert refused(server, prompt="p", best_of=9)["code"] == "request_too_large"


def test_a_prompt_that_was_cut_is_echoed_as_it_was_run(server: LiveServer) -> None:
    for prompt in ("abcd", [97, 98, 99, 100]):
        whole = complete(server, prompt=prompt, truncate_prompt_tokens=2, echo=True, max_tokens=1)
        assert whole["choices"][0]["text"] == "cdx"
        assert whole["usage"]["prompt_tokens"] == 2
    long = "x" * (12 * 2048 + 1)
    assert complete(server, prompt=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 2048 - 16


def test_answers_carry_the_fingerprint_of_what_made_them(server: LiveServer) -> None:
    whole = complete(server, prompt="p")
    assert whole["system_fingerprint"].startswith("fp_")
    chunks = post_stream(server.http, PATH, {"prompt": "p"})
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}
    assert server.http.get("/server_info").json()["system_fingerprint"] == whole["system_fingerprint"]


def test_a_whole_answer_says_where_its_time_went(server: LiveServer) -> None:
    timing = server.http.post(PATH, json={"prompt": "p"}).headers["server-timing"]
    parts = dict(part.split(";dur=") for part in timing.split(", "))
    assert list(parts) == ["first", "decode", "total"]
    assert float(parts["first"]) + float(parts["decode"]) == pytest.approx(float(parts["total"]), abs=0.2)


def test_options_of_the_server_hold_for_every_request(tiny: TinyTokenizer) -> None:
    settings = Settings(access_log=False, strict_params=True, enable_force_include_usage=True, context_overflow="clamp")
    with live_server(scripted_client(max_model_len=32), settings) as server:
        assert refused(server, prompt=[5], foo=1)["param"] == "foo"
        *_, last = post_stream(server.http, PATH, {"prompt": [5], "max_tokens": 500})
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 31)


def test_4_7_unknown_fields_are_named_in_a_header_and_once_in_the_log(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        answer = server.http.post(PATH, json={"prompt": "p", "frobnicate": 1})
        assert (answer.status_code, answer.headers["x-ignored-params"]) == (200, "frobnicate")
    assert caplog.text.count("frobnicate") == 1


def test_a_request_that_waits_too_long_for_a_place_is_a_503(tiny: TinyTokenizer) -> None:
    executor = ScriptedExecutor(count_up)
    executor.hold()
    settings = Settings(access_log=False, queue_timeout=0.2)
    with live_server(scripted_client(executor, max_num_seqs=1), settings) as server:
        answers: dict[int, httpx.Response] = {}

        def ask(token: int) -> None:
            answers[token] = server.http.post(PATH, json={"prompt": [token], "max_tokens": 4})

        threads = [threading.Thread(target=ask, args=(token,)) for token in (5, 6)]
        threads[0].start()
        executor.wait_held()
        threads[1].start()
        until(lambda: server.metric("cellserve:choices_started_total") == 2)
        executor.release(1)
        executor.wait_held()
        deadline_s = time.monotonic() + 0.25
        until(lambda: time.monotonic() > deadline_s)
        executor.release()
        for thread in threads:
            thread.join()
        assert answers[5].status_code == 200
        assert (answers[6].status_code, answers[6].json()["error"]["code"]) == (503, "queue_timeout")
        assert int(answers[6].headers["Retry-After"]) >= 1


def test_the_openai_client_reads_every_answer_strictly(server: LiveServer) -> None:
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="x",
        _strict_response_validation=True,
        http_client=httpx.Client(trust_env=False),
    ) as client:
        # Not echo with logprobs: their types have no null for a prompt's first token.
        whole = client.completions.create(model=DEFAULT_MODEL_NAME, prompt="q", max_tokens=4, logprobs=2, n=2)
        assert [choice.text for choice in whole.choices] == ["Sum: 42"] * 2
        chunks = list(
            client.completions.create(
                model=DEFAULT_MODEL_NAME, prompt="q", max_tokens=1, stream=True, stream_options={"include_usage": True}
            )
        )
        # One token, so one chunk: their types have no null for the finish_reason of those before the last either.
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Sum"
        assert chunks[-1].usage is not None
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="other", prompt="q")


def test_a_model_without_a_tokenizer_answers_ids() -> None:
    with live_server(scripted_client()) as server:
        choice = choice_of(server, prompt=[5, 6], max_tokens=3, logprobs=1, echo=True, return_token_ids=True)
        assert (choice["text"], choice["token_ids"]) == ("", [7, 8, 9])
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in range(5, 10)]
        assert refused(server, prompt="hi")["param"] == "prompt"


class Held:
    """A server whose engine stands still until told otherwise."""

    def __init__(self, tiny: TinyTokenizer, **info: Any) -> None:
        self.executor = ScriptedExecutor(count_up)
        self.client = scripted_client(self.executor, **info)

    def __enter__(self) -> "Held":
        self._context = live_server(self.client)
        self.server = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.executor.release()
        self._context.__exit__(*error)

    def in_use(self) -> int:
        return self.server.call(lambda: self.server.app.state.serving.admission.in_use)

    def is_empty(self) -> bool:
        return self.in_use() == 0 and self.server.call(lambda: self.client.num_outstanding) == 0


@pytest.fixture
def held(tiny: TinyTokenizer) -> Iterator[Held]:
    with Held(tiny) as held:
        yield held


@pytest.mark.parametrize("stream", [False, True])
def test_b25_b28_a_client_that_leaves_takes_its_request_with_it(held: Held, stream: bool) -> None:
    held.executor.hold()
    body = json.dumps({"prompt": [5], "max_tokens": 400, "stream": stream}).encode()
    with httpx.Client(base_url=held.server.url, trust_env=False) as leaver:
        thread = threading.Thread(target=_leave_while_waiting, args=(leaver, body))
        thread.start()
        held.executor.wait_held()
        thread.join()
    batches = len(held.executor.batches)
    until(lambda: held.in_use() == 0)
    held.executor.release()
    until(held.is_empty)
    assert len(held.executor.batches) <= batches + 2
    until(lambda: held.server.metric("vllm:request_success_total", finished_reason="abort") == 1)


def _leave_while_waiting(client: httpx.Client, body: bytes) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post(PATH, content=body, timeout=httpx.Timeout(5, read=0.3))


def test_b25_a_stream_left_in_the_middle_is_cancelled(held: Held) -> None:
    held.executor.release(3)
    with held.server.http.stream("POST", PATH, json={"prompt": [5], "max_tokens": 400, "stream": True}) as answer:
        held.executor.wait_held()
    until(lambda: held.in_use() == 0)
    held.executor.release()
    until(held.is_empty)
    assert len(held.executor.batches) <= 7
    assert answer.status_code == 200


def test_b30_a_step_that_fails_before_the_first_byte_is_a_true_status(held: Held) -> None:
    for stream in (False, True):
        for number in (1, 2):  # it is given a second chance
            held.executor.fail_step(len(held.executor.batches) + number)
        answer = held.server.http.post(PATH, json={"prompt": [5], "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert held.is_empty()


def test_b30_a_failure_in_mid_stream_is_an_error_event_behind_what_there_was(tiny: TinyTokenizer) -> None:
    info = {"tokenizer_dir": str(tiny.folder), "vocab_size": tiny.vocab_size, "eos_token_ids": ()}
    with Held(tiny, **info) as held:
        for number in (6, 7):
            held.executor.fail_step(number)
        body = {"prompt": [96], "max_tokens": 20, "stop": ["cdefgh"], "stream": True}
        with held.server.http.stream("POST", PATH, json=body) as answer:
            assert answer.status_code == 200
            chunks = list(events(answer.iter_lines()))
        *parts, last = chunks
        # The held-back tail comes before the error.
        assert "".join(chunk["choices"][0]["text"] for chunk in parts) == "abcde"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in parts)
        assert set(last["error"]) == {"message", "type", "param", "code"}
        until(held.is_empty)
        for number in (4, 5):
            held.executor.fail_step(len(held.executor.batches) + number)
        with (
            openai.OpenAI(
                base_url=f"{held.server.url}/v1", api_key="x", http_client=httpx.Client(trust_env=False), max_retries=0
            ) as client,
            pytest.raises(openai.APIError, match="failed to answer"),
        ):
            list(client.completions.create(model=DEFAULT_MODEL_NAME, prompt=[96], max_tokens=20, stream=True))


def test_a_deadline_that_passes_in_the_queue_is_a_504(tiny: TinyTokenizer) -> None:
    with Held(tiny, max_num_seqs=1) as held:
        held.executor.hold()
        answers: list[httpx.Response] = []
        bodies = [{"prompt": [5], "max_tokens": 8}, {"prompt": [6], "timeout": 0.001, "stream": True}]
        threads = [
            threading.Thread(target=lambda body=body: answers.append(held.server.http.post(PATH, json=body)))
            for body in bodies
        ]
        for waiting, thread in enumerate(threads, start=1):
            thread.start()
            until(lambda: held.in_use() == waiting)  # noqa: B023
        held.executor.wait_held()
        held.executor.release(1)
        held.executor.wait_held()
        # The engine has read the second request by now, and its millisecond passes.
        deadline_s = time.monotonic() + 0.002
        until(lambda: time.monotonic() > deadline_s)
        held.executor.release()
        for thread in threads:
            thread.join()
        late = next(answer for answer in answers if answer.status_code != 200)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_without_a_tokenizer_every_step_is_still_news(held: Held) -> None:
    held.executor.hold()
    body = {"prompt": [5], "max_tokens": 3, "stream": True, "return_token_ids": True}
    ids = []
    held.executor.release(1)
    with held.server.http.stream("POST", PATH, json=body) as answer:
        for chunk in events(answer.iter_lines()):
            ids.append(chunk["choices"][0]["token_ids"])
            held.executor.release(1)
    assert [i for part in ids for i in part] == [6, 7, 8]
    assert len(ids) == 3


def test_a_full_server_refuses_with_429_before_tokenising(held: Held) -> None:
    held.executor.hold()
    threads = [
        threading.Thread(target=lambda: held.server.http.post(PATH, json={"prompt": [5], "n": 8, "max_tokens": 2}))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    until(lambda: held.in_use() == 16)
    answer = held.server.http.post(PATH, json={"prompt": "no tokenizer is asked", "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    held.executor.release()
    for thread in threads:
        thread.join()


def test_the_books_balance_after_every_kind_of_end(server: LiveServer, tiny: TinyTokenizer) -> None:
    def finished() -> float:
        reasons = ("stop", "length", "abort", "error")
        return sum(server.metric("vllm:request_success_total", finished_reason=reason) for reason in reasons)

    before, tokens_before = finished(), server.metric("vllm:generation_tokens_total")
    complete(server, prompt=["q", "eos"], n=2, stop=["\nEND"])
    # Sent twice, whole and streamed.
    assert finished() - before == 8
    assert server.metric("vllm:generation_tokens_total") - tokens_before == 2 * 2 * (7 + 3)
    assert finished() == server.metric("cellserve:choices_started_total")
