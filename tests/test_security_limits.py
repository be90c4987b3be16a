"""Numbers and names that become sizes, indices and keys; what one tenant sees of another (S2 to S5, S14, S15)."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from cache.offload.chunks import Namespace, chunk_key, chunks_of
from engine import dispatch, grammar
from engine.client import EngineClient
from server.settings import Settings
from support.live_server import LiveServer, live_server
from support.scripted import scripted_client
from support.toy_server import toy_client, write_toy_tokenizer

SIZES = {
    # Field -> (the largest that is taken, one more, what it is asked with).
    "stop": (["a"] * 4, ["a"] * 5),
    "logprobs": (20, 21),
    "prompt_logprobs": (20, 21),
    "logit_bias": ({str(i): 0 for i in range(32)}, {str(i): 0 for i in range(1025)}),
    "stop_token_ids": ([1] * 1024, [1] * 1025),
    "bad_words": (["a"] * 128, ["a"] * 129),
    "cache_salt": ("s" * 256, "s" * 257),
    "n": (8, 9),
    "best_of": (8, 9),
    "temperature": (2, 2.0000001),
    "top_p": (1, 1.0000001),
    "presence_penalty": (2, 2.1),
    "repetition_penalty": (1000, 1000.1),
    "seed": (2**63 - 1, 2**63),
    "priority": (2**31 - 1, 2**31),
    "timeout": (86400, 86401),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> EngineClient:
    return toy_client(write_toy_tokenizer(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def server(client: EngineClient) -> Iterator[LiveServer]:
    with live_server(client, Settings(model="toy", access_log=False)) as server:
        yield server


def ask(server: LiveServer, **fields: Any) -> tuple[int, dict[str, Any]]:
    content = json.dumps({"prompt": "a", "max_tokens": 1, **fields})  # httpx would refuse to write NaN
    answer = server.http.post("/v1/completions", content=content)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("field", SIZES)
def test_the_limit_is_taken_and_one_more_is_refused_by_name(server: LiveServer, field: str) -> None:
    """S2."""
    most, too_many = SIZES[field]
    status, answer = ask(server, **{field: most})
    assert status == 200, answer
    status, answer = ask(server, **{field: too_many})
    assert status == 400
    # n and best_of are sizes of the whole request.
    assert answer["error"]["param"] in (field, None) if field in ("n", "best_of") else answer["error"]["param"] == field


BEYOND = [2**31, 2**32 + 7, 2**63, -(2**63) - 1, 2**64 + 1, 10**40, 1e308, 1e999, float("nan"), -float("inf")]
INDICES = (
    *("max_tokens", "min_tokens", "n", "best_of", "logprobs", "prompt_logprobs", "top_k", "seed", "priority"),
    *("truncate_prompt_tokens", "temperature", "top_p", "min_p", "timeout", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)


@pytest.mark.parametrize("field", INDICES)
def test_numbers_beyond_everything_are_refused_or_mean_no_limit(server: LiveServer, field: str) -> None:
    """S2, S3: nothing that is no number of 64 bits, or no number at all, goes any further than the door."""
    for value in BEYOND:
        status, answer = ask(server, **{field: value})
        is_no_limit = field in ("top_k", "truncate_prompt_tokens") and isinstance(value, int) and value > 0
        is_seed = field == "seed" and isinstance(value, int) and -(2**63) <= value < 2**63
        assert status == (200 if is_no_limit or is_seed else 400), (value, answer)


@pytest.mark.parametrize("value", [-1, 32, 33, 2**31, 2**63, 2**64, 1.0, 1.5, "1", True, None, float("nan"), [1], {}])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "prompt"])
def test_an_id_that_is_none_of_the_models_never_reaches_it(server: LiveServer, field: str, value: Any) -> None:
    """S3: 32 ids, 0 to 31; true is no 1, and neither is 1.0 or "1"."""
    if field == "prompt" and value in ("1", [1]):
        return  # a list of texts, and one of lists of ids
    status, answer = ask(server, **{field: [value]})
    assert status == 400, answer


def test_hundreds_of_mixes_of_ids_and_numbers_leave_the_engine_as_it_was(server: LiveServer) -> None:
    """S3."""
    before = ask(server, prompt="abc", max_tokens=20, temperature=0)[1]["choices"][0]["text"]
    mixed = random.Random(5)
    odd: list[Any] = [-1, 0, 31, 32, 63, 2**31, -0.0, 1e-320, 7.5, "7", True, None, float("nan"), float("inf")]
    for _ in range(300):
        fields = {name: mixed.choice(odd) for name in mixed.sample(INDICES, 3)}
        fields[mixed.choice(("stop_token_ids", "allowed_token_ids"))] = [mixed.choice(odd), mixed.choice(odd)]
        fields["logit_bias"] = {str(mixed.choice(odd)): mixed.choice(odd)}
        status, answer = ask(server, **fields)
        assert status in (200, 400, 504), (fields, answer)
    assert ask(server, prompt="abc", max_tokens=20, temperature=0)[1]["choices"][0]["text"] == before


TINY = [1e-320, 5e-324, 1e-45, 1e-38, 1e-30, 1e-6, 1.1e-5]


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty", "top_p", "min_p"])
def test_numbers_at_the_edge_of_nothing_still_draw_a_token(server: LiveServer, field: str) -> None:
    """S3: what is a number to the door and zero to the device must not become infinity, or no number, there."""
    for value in TINY:
        status, answer = ask(server, **{field: value}, max_tokens=4, logprobs=2)
        assert status == 200, (value, answer)


# Time bombs.

BACKTRACKING = [
    *("(a+)+b", "(a|a)*b", "(a|aa)+$", "([a-z]+)*x", "(.*)*b", "(a*)*b", "((a+)*)*b", "(x+x+)+y", "(a?){40}a{40}"),
    *(
        "^(([a-z])+.)+[A-Z]([a-z])+$",
        r"(\w+\s?)*!",
        r"(\d+)*\.",
        "(a|b|ab)*c",
        "(ab?)*(ba?)*c",
        "(.*a){30}",
        "(.+)+\\1",
    ),
    *("(?:a|b|c|d|e){1,100}f", "[^x]*[^y]*[^z]*!", "(a{1,30}){1,30}", "(.{1,100}){1,100}", "a{1,1000}b{1,1000}"),
    *(
        "(?=a)b",
        "(?<=a)b",
        "(?P<n>a)(?P=n)",
        "\\p{L}{1,100}",
        "(?i)" + "é" * 500,
        "|".join(f"a{i}" for i in range(2000)),
    ),
    *(
        ".*" * 300,
        "(a" * 200 + ")*" * 200,
        "[a-z]{500}",
        "a{1000000}",
        "(a{1000}){1000}",
        "\\b" * 300,
        "^" * 300,
        "$" * 300,
    ),
    *(
        "(" * 300,
        "[" * 300,
        "[[:alpha:]]{99}",
        "[^\\n]{3000}",
        "(?x) a b # c",
        "\\u{110000}",
        "\\x{ffffffff}",
        "\\Q" * 99,
    ),
]


@pytest.mark.parametrize("expression", BACKTRACKING)
def test_a_hostile_expression_is_refused_or_followed_and_somebody_else_is_answered(
    server: LiveServer, expression: str
) -> None:
    """S4: no backtracking, and limits of size; off the event loop."""
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": expression}}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code in (200, 400), answer.text


def test_what_is_kept_of_grammars_is_bounded(server: LiveServer, client: EngineClient) -> None:
    """S5: the two caches of grammars are the only ones that a caller fills with entries of his own making."""
    for number in range(dispatch._MAX_KNOWN_GRAMMARS + 50):
        body = {"prompt": "a", "max_tokens": 0, "structured_outputs": {"choice": [f"a{number}"]}}
        assert server.http.post("/v1/completions", json=body).status_code == 200
    assert len(client._good_grammars) == dispatch._MAX_KNOWN_GRAMMARS
    assert grammar.MAX_COMPILED <= 64


def test_what_is_kept_of_names_is_bounded(server: LiveServer) -> None:
    """S5: fields that nobody knows, salts, users, request ids and models leave nothing that grows."""
    random_ = random.Random(1)
    for _ in range(100):
        name = "".join(random_.choices(string.ascii_letters, k=12))
        body = {"prompt": "a", "max_tokens": 1, "cache_salt": name, "user": name, name: 1}
        assert server.http.post("/v1/completions", json=body, headers={"X-Request-Id": name}).status_code == 200
        assert server.http.get(f"/{name}").status_code == 404
        assert server.http.post("/v1/completions", json={**body, "model": name}).status_code == 404
    serving = server.app.state.serving
    assert len(serving._said) <= 256 + 16
    assert serving.running._by_name == {}
    series = server.http.get("/metrics").text.count("\n")
    assert series < 2000, "no series is named after what a caller made up"


# Keys of what is kept.


def every_key() -> Iterator[bytes]:
    """Of chunks that differ in one thing each: a field of the namespace, its framing, a token, their order."""
    base = Namespace(weights="w", dtype="float32", geometry="g", rope="r")
    others = [
        *(replace(base, salt=salt) for salt in ("a", "b", "a ", "A", "None", "null", "\0", '"', "a" * 256)),
        *(replace(base, adapter=adapter) for adapter in ("a", "None", "x")),
        *(replace(base, **{field: "z"}) for field in ("weights", "dtype", "geometry", "rope")),
        replace(base, weights="wf", dtype="loat32"),
        replace(base, rope='r","salt":"a'),
    ]
    ordinary = np.arange(16, dtype=np.uint32)
    for namespace in (base, *others):
        for chunk in chunks_of(namespace, [*range(16), *range(16)], 16):
            yield chunk.key
        yield namespace.root
    for place in range(16):
        for token in (16, 255, 256, 2**31, 2**32 - 1):
            yield chunk_key(base.root, np.array([*ordinary[:place], token, *ordinary[place + 1 :]], np.uint32))
    yield chunk_key(base.root, np.array([1, 23] * 8, np.uint32))
    yield chunk_key(base.root, np.array([12, 3] * 8, np.uint32))
    yield chunk_key(base.root, ordinary[::-1].copy())
    random_tokens = np.random.default_rng(7).integers(0, 2**32, (20_000, 16), dtype=np.uint32)
    yield from (chunk_key(base.root, tokens) for tokens in random_tokens)


def test_keys_of_chunks_are_different_for_whatever_differs() -> None:
    """S14: 128 bits of a cryptographic hash over everything that decides what a chunk holds."""
    keys = list(every_key())
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {16}


def test_keys_of_chunks_are_the_same_in_every_process() -> None:
    """S14: these were made by another one."""
    assert [key.hex() for key in islice(every_key(), 3)] == [
        "de1fa48d0b6382c65b9adc2364592f9e",
        "db0290594d90f961c77c8d233759f146",
        "09c9d21e9796c1c23cf7765d4911a3a6",
    ]


# Tenants.


def test_one_salt_never_finds_what_another_kept() -> None:
    """S15: neither the tokens that were reused nor the time that it saves tell one tenant of another's prompt."""
    with live_server(scripted_client(), Settings(access_log=False)) as server:
        prompt = list(range(1, 300))

        def cached(**fields: Any) -> int:
            body = {"prompt": prompt, "max_tokens": 1, **fields}
            usage = server.http.post("/v1/completions", json=body).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached(cache_salt="a") == 0
        again = cached(cache_salt="a")
        assert again > 0
        assert [cached(cache_salt=salt) for salt in ("b", "A", "a ", "a\0", "á")] == [0] * 5
        assert cached() == 0, "and no salt is a salt of its own"
        assert cached(cache_salt="a") == again


def test_a_wrong_request_beside_a_stream_changes_none_of_its_tokens(server: LiveServer) -> None:
    """S3, S20: hostile expressions, bodies and clients that leave, while a stream runs."""
    body = {"prompt": "abc", "max_tokens": 50, "temperature": 0}
    alone = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        said = ""
        num_attacks = 0
        for line in lines:
            if not line.startswith("data: {"):
                continue
            said += json.loads(line[6:])["choices"][0]["text"]
            num_attacks += 1
            if num_attacks > 3:
                continue
            ask(server, structured_outputs={"regex": "(a{1000}){1000}"})
            ask(server, prompt=[99])
            server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n")
    assert said == alone
