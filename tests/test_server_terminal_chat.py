"""A conversation on the terminal: what is sent, what is shown, and what is remembered."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server import cli
from server.terminal_chat import ChatError, Conversation
from support.live_server import LiveServer, live_server
from support.scripted import Answer, ScriptedExecutor, scripted_client
from support.tiny_tokenizer import TinyTokenizer, write_byte_level


def parrot(tiny: TinyTokenizer) -> Answer:
    """Answers "yes", then ends."""
    words = (*b"yes", tiny.eos_id)
    return lambda prompt, generated, seed: words[len(generated)]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, executor: ScriptedExecutor) -> Iterator[LiveServer]:
    tiny = write_byte_level(tmp_path_factory.mktemp("tiny"))
    executor.answer = parrot(tiny)
    info = {"tokenizer_dir": str(tiny.folder), "vocab_size": tiny.vocab_size, "eos_token_ids": (tiny.eos_id,)}
    with live_server(scripted_client(executor, **info)) as live:
        yield live


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client


def test_answers_are_shown_as_they_come_and_remembered(http: httpx.Client) -> None:
    chat = Conversation(http, {"temperature": 0, "model": None}, "be brief")
    shown: list[str] = []
    assert chat.say("hi", shown.append) == "".join(shown) == "yes"
    chat.say("again", shown.append)
    assert [message["content"] for message in chat.messages] == ["be brief", "hi", "yes", "again", "yes"]
    chat.clear()
    assert [message["role"] for message in chat.messages] == ["system"]


def test_a_refusal_is_told_in_the_servers_words_and_forgotten(http: httpx.Client) -> None:
    chat = Conversation(http, {"model": "other"})
    with pytest.raises(ChatError, match="not served here"):
        chat.say("hi", print)
    assert chat.messages == []


def test_a_failure_in_mid_answer_is_told(http: httpx.Client, executor: ScriptedExecutor) -> None:
    executor.fail_step(len(executor.batches) + 1)
    executor.fail_step(len(executor.batches) + 2)
    with pytest.raises(ChatError, match="failed to answer"):
        Conversation(http, {}).say("hi", print)


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(http: httpx.Client) -> None:
    chat = Conversation(http, {})

    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    said = chat.say("hi", stop)
    assert said.startswith("y")
    assert chat.messages[-1] == {"role": "assistant", "content": said}


def test_a_piped_conversation_answers_line_by_line(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/clear\n\nmore\n"))
    assert cli.main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out == "yes\nyes\n"


def test_one_question_on_the_command_line_gets_one_answer(
    server: LiveServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["chat", "hi", "--url", server.url, "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out == "y\n"


def test_no_server_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "hi", "--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("chat: no answer from http://127.0.0.1:9")
    assert said.err.count("\n") == 1
