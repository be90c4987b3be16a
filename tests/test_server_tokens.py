"""Text to ids and back over HTTP, in the words of both servers whose clients come here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.live_server import LiveServer, live_server
from support.scripted import scripted_client
from support.tiny_tokenizer import BOS, EOS, TinyTokenizer, write_byte_level


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTokenizer:
    return write_byte_level(tmp_path_factory.mktemp("tiny"), ["word"], adds_bos=True)


@pytest.fixture(scope="module")
def server(tiny: TinyTokenizer) -> Iterator[LiveServer]:
    with live_server(scripted_client(tokenizer_dir=str(tiny.folder), vocab_size=tiny.vocab_size)) as live:
        yield live


def post(server: LiveServer, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def test_a_prompt_is_tokenised_as_completions_would(server: LiveServer, tiny: TinyTokenizer) -> None:
    (bos,) = tiny.ids(BOS)
    assert post(server, "/tokenize", prompt="ab") == {"count": 3, "max_model_len": 512, "tokens": [bos, 97, 98]}
    assert post(server, "/tokenize", prompt="ab", add_special_tokens=False)["tokens"] == [97, 98]


def test_messages_are_tokenised_as_a_chat_would_be(server: LiveServer, tiny: TinyTokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    asked = post(server, "/tokenize", messages=messages)["tokens"]
    (start,) = tiny.ids("<|im_start|>")
    assert asked[0] == start
    usage = post(server, "/v1/chat/completions", messages=messages, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == len(asked)
    assert len(post(server, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]) < len(asked)


def test_content_is_tokenised_as_llama_cpp_does(server: LiveServer, tiny: TinyTokenizer) -> None:
    assert post(server, "/tokenize", content="ab")["tokens"] == [97, 98]
    assert post(server, "/tokenize", content="ab", add_special=True)["tokens"] == [*tiny.ids(BOS), 97, 98]
    pieces = post(server, "/tokenize", content="aé", with_pieces=True)["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    assert post(server, "/tokenize", content="")["tokens"] == []


def test_tokens_are_named_as_logprobs_name_them(server: LiveServer) -> None:
    answer = post(server, "/tokenize", prompt="aé", add_special_tokens=False, return_token_strs=True)
    assert answer["token_strs"] == ["a", r"bytes:\xc3", r"bytes:\xa9"]


def test_ids_become_text_with_their_control_tokens(server: LiveServer, tiny: TinyTokenizer) -> None:
    ids = [*tiny.ids(BOS, "word", "!", EOS)]
    answer = post(server, "/detokenize", tokens=ids)
    assert answer == {"prompt": f"{BOS}word!{EOS}", "content": f"{BOS}word!{EOS}"}
    assert post(server, "/detokenize", tokens=[])["prompt"] == ""


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": None}, "prompt"),
    ("/tokenize", {"prompt": "a", "content": "b"}, "content"),
    ("/tokenize", {"prompt": 7}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "ab"}, "tokens"),
    ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ("/detokenize", {"tokens": [100_000]}, "tokens"),
])  # fmt: skip
def test_what_cannot_be_is_a_400_that_names_it(server: LiveServer, path: str, body: Any, param: str) -> None:
    assert post(server, path, 400, **body)["error"]["param"] == param


def test_an_unknown_model_is_a_404_here_too(server: LiveServer) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert post(server, path, 404, model="other", **body)["error"]["code"] == "model_not_found"


def test_the_tokenizer_describes_itself_and_no_folder(server: LiveServer, tiny: TinyTokenizer) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == (BOS, EOS)
    assert (info["vocab_size"], info["model_max_length"]) == (tiny.vocab_size, 512)
    assert "<|im_start|>" in info["chat_template"]
    assert str(tiny.folder) not in str(info)


def test_a_model_without_a_tokenizer_says_so() -> None:
    with live_server(scripted_client()) as server:
        for answer in (
            server.http.post("/tokenize", json={"prompt": "a"}),
            server.http.post("/detokenize", json={"tokens": [1]}),
            server.http.get("/tokenizer_info"),
        ):
            assert answer.status_code == 400
            assert "no tokenizer" in answer.json()["error"]["message"]
