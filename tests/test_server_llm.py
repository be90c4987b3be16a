import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from engine.client import InProcessClient
from engine.errors import ModelError
from engine.loop import EngineLoop
from engine.thread import ProgressCallback
from engine.types import EngineInfo
from server.llm import LLM
from support.scripted import ScriptedExecutor, from_script, scripted_client
from support.tiny_tokenizer import TinyTokenizer, write_byte_level


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTokenizer:
    return write_byte_level(tmp_path_factory.mktemp("tiny"), ["Hello", " you"])


@pytest.fixture(scope="module")
def executor(tiny: TinyTokenizer) -> ScriptedExecutor:
    return ScriptedExecutor(from_script({tuple(b"hi"): [*tiny.ids("Hello", " you"), tiny.eos_id]}))


@pytest.fixture(scope="module")
def llm(tiny: TinyTokenizer, executor: ScriptedExecutor) -> Iterator[LLM]:
    client = scripted_client(
        executor,
        tokenizer_dir=str(tiny.folder),
        vocab_size=tiny.vocab_size,
        eos_token_ids=(tiny.eos_id,),
        max_num_seqs=2,
        max_waiting=1,
    )
    with LLM.from_client(client) as llm:
        yield llm


def test_text_comes_back_for_text(llm: LLM, tiny: TinyTokenizer) -> None:
    (completion,) = llm.generate("hi", n=2, logprobs=0)
    assert completion.prompt == "hi"
    assert completion.prompt_token_ids == tuple(b"hi")
    for choice in completion.choices:
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("Hello you", "stop", None)
        assert choice.token_ids == (*tiny.ids("Hello", " you"), tiny.eos_id)
        assert len(choice.logprobs) == 3


def test_more_prompts_than_the_engine_holds_are_answered_in_order(llm: LLM, executor: ScriptedExecutor) -> None:
    completions = llm.generate([(first,) for first in range(97, 117)], max_tokens=2)
    assert [c.choices[0].text for c in completions] == [chr(i + 1) + chr(i + 2) for i in range(97, 117)]
    assert not executor.sessions


def test_stop_strings_act(llm: LLM) -> None:
    (choice,) = llm.generate(["hi"], stop="lo")[0].choices
    assert (choice.text, choice.stop_reason) == ("Hel", "lo")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"tempreature": 1}, "tempreature"),
        ({"stream": True}, "stream"),
        ({"max_tokens": 1000}, "context"),
        ({"n": 9}, "n is 9"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_obeyed_is_a_value_error_by_name(llm: LLM, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        llm.generate("hi", **fields)
    assert llm.generate("hi")[0].choices[0].text == "Hello you"


def test_one_impossible_prompt_fails_the_call_and_leaves_nothing_running(llm: LLM, executor: ScriptedExecutor) -> None:
    with pytest.raises(ValueError, match="5000"):
        llm.generate([[97], [5000], [98]])
    assert llm.generate("hi")[0].choices[0].finish_reason == "stop"
    assert not executor.sessions


def test_a_failed_step_is_a_runtime_error_and_the_engine_goes_on(llm: LLM, executor: ScriptedExecutor) -> None:
    executor.fail_session(b"bad")
    with pytest.raises(RuntimeError, match="failed to answer"):
        llm.generate("bad")
    assert llm.generate("hi")[0].choices[0].text == "Hello you"


def test_it_works_where_an_event_loop_already_runs(llm: LLM) -> None:
    async def notebook() -> str:
        return llm.generate("hi")[0].choices[0].text

    assert asyncio.run(notebook()) == "Hello you"


def test_a_model_that_cannot_be_loaded_says_why() -> None:
    def build(progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
        raise ModelError("the folder holds no config.json")

    with pytest.raises(ModelError, match=r"no config\.json"):
        LLM.from_client(InProcessClient(build))


def test_closing_twice_is_harmless() -> None:
    llm = LLM.from_client(scripted_client())
    assert llm.generate([[5, 6]], max_tokens=2)[0].choices[0].token_ids == (7, 8)
    llm.close()
    llm.close()
