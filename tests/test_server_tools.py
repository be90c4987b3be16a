"""Tool calls in chats: what the template is shown, what the model's text becomes, streamed as whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.config import DEFAULT_MODEL_NAME
from server import tools
from server.settings import Settings
from server.tool_parsers import ToolCall, required_parser
from server.tools import Tool, format_of
from support.grammar_noise import answer as noise_answer
from support.grammar_noise import grammars_of
from support.live_server import LiveServer, live_server
from support.scripted import ScriptedExecutor, scripted_client
from support.sse import post_stream, strict_json
from support.tiny_tokenizer import TinyTokenizer, write_byte_level
from support.toy_server import toy_client, write_toy_tokenizer

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
F = {"type": "function", "function": {"name": "f", "description": "Does.", "parameters": PARAMETERS}}
G = {"type": "function", "function": {"name": "g"}}
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL_G = '<tool_call>{"name": "g", "arguments": {"é": "x"}}</tool_call>'


class Script:
    """A model that says `text`."""

    def __init__(self) -> None:
        self.text = ""
        self.prompt: tuple[int, ...] = ()
        self.tiny: TinyTokenizer

    def __call__(self, prompt: tuple[int, ...], generated: tuple[int, ...], seed: int) -> int:
        self.prompt = prompt
        said = self.text.encode()
        return said[len(generated)] if len(generated) < len(said) else self.tiny.eos_id


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, script: Script) -> Iterator[LiveServer]:
    script.tiny = tiny = write_byte_level(tmp_path_factory.mktemp("tiny"), chat_template=TEMPLATE)
    client = scripted_client(
        ScriptedExecutor(script),
        tokenizer_dir=str(tiny.folder),
        vocab_size=tiny.vocab_size,
        eos_token_ids=(tiny.eos_id,),
        max_model_len=2048,
        has_grammars=True,
    )
    with live_server(client) as live:
        yield live


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "tools": [F, G], **fields}


def without_ids(calls: Any) -> Any:
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.pop("id")) for call in calls or [])
    return calls


def chat(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """The only choice, without ids; the same request streamed must say the same."""
    answer = server.http.post(PATH, json=body(**fields))
    assert answer.status_code == 200, answer.text
    (whole,) = strict_json(answer.text)["choices"]
    content, calls, reasons = "", [], []
    for chunk in post_stream(server.http, PATH, body(**fields)):
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        calls += choice["delta"].get("tool_calls", [])
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    assert content == (whole["message"]["content"] or "")
    assert without_ids(calls) == without_ids(whole["message"].get("tool_calls", []))
    assert reasons == [whole["finish_reason"]]
    result: dict[str, Any] = whole
    return result


def test_calls_are_told_apart_from_the_text_before_them(server: LiveServer, script: Script) -> None:
    script.text = f"Let me see.\n{CALL_F}\n{CALL_G}"
    choice = chat(server)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"type": "function", "function": {"name": "g", "arguments": '{"é": "x"}'}},
        ],
    }


def test_an_answer_of_calls_alone_has_no_content(server: LiveServer, script: Script) -> None:
    script.text = CALL_F
    assert chat(server)["message"]["content"] is None


def test_parallel_tool_calls_false_is_one_call_at_most(server: LiveServer, script: Script) -> None:
    script.text = CALL_F + CALL_G
    assert len(chat(server, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_text_without_a_call_and_calls_that_none_asked_for_are_content(server: LiveServer, script: Script) -> None:
    for text, fields in (
        ("Only < text <tool", {}),
        (CALL_F, {"tool_choice": "none"}),
        (CALL_F, {"tools": None}),
        (CALL_F, {"tools": []}),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', {}),
    ):
        script.text = text
        choice = chat(server, **fields)
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "stop"


def test_a_call_that_the_limit_cut_is_content_and_long(server: LiveServer, script: Script) -> None:
    script.text = CALL_F
    choice = chat(server, max_tokens=20)
    assert choice["message"] == {"role": "assistant", "content": CALL_F[:20], "refusal": None}
    assert choice["finish_reason"] == "length"


def test_logprobs_tell_of_every_token_of_a_call(server: LiveServer, script: Script) -> None:
    script.text = CALL_F
    fields = body(logprobs=True)
    entries = server.http.post(PATH, json=fields).json()["choices"][0]["logprobs"]["content"]
    chunks = post_stream(server.http, PATH, fields)
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert "".join(entry["token"] for entry in entries) == CALL_F + "</s>"
    assert streamed == entries


def test_the_template_sees_tools_calls_as_objects_and_what_they_returned(server: LiveServer, script: Script) -> None:
    script.text = "ok"
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "<|im_end|>3"},
    ]
    chat(server, messages=messages, tools=[G])
    expected = (
        '[{"type": "function", "function": {"name": "g"}}]\n'
        'user:hiassistant:<tool_call>{"name": "f", "arguments": {"a": 2}}</tool_call>tool:<|im_end|>3'
    )
    assert script.prompt == tuple(expected.encode()), "control tokens in what a tool returned are text"
    fields = {"messages": messages, "tools": [G]}
    assert server.http.post("/tokenize", json=fields).json()["tokens"] == list(script.prompt)


def test_control_tokens_in_the_names_of_arguments_are_text(server: LiveServer, script: Script) -> None:
    script.text = "ok"
    parameters = {"type": "object", "properties": {"<|im_end|>": {"description": "</s>"}}}
    chat(server, tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert max(script.prompt) < 256


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F, F]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "with space"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_called_is_a_400_by_name(
    server: LiveServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = server.http.post(PATH, json=body(**fields, stream=stream))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_template_without_a_place_for_tools_refuses_them(tmp_path: Path) -> None:
    tiny = write_byte_level(tmp_path)
    client = scripted_client(tokenizer_dir=str(tiny.folder), vocab_size=tiny.vocab_size)
    with live_server(client, Settings(access_log=False, tool_call_parser="mistral")) as server:
        answer = server.http.post(PATH, json=body())
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


def test_the_openai_client_reads_both_shapes(server: LiveServer, script: Script) -> None:
    script.text = f"So: {CALL_F}"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        whole = client.chat.completions.create(
            model=DEFAULT_MODEL_NAME,
            messages=[{"role": "user", "content": "hi"}],
            tools=[F],  # type: ignore[list-item]
        )
        assert whole.choices[0].message.tool_calls
        assert whole.choices[0].message.tool_calls[0].function.name == "f"  # type: ignore[union-attr]
        with client.chat.completions.stream(
            model=DEFAULT_MODEL_NAME,
            messages=[{"role": "user", "content": "hi"}],
            tools=[F],  # type: ignore[list-item]
        ) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls
        assert json.loads(final.message.tool_calls[0].function.arguments) == {"a": 1}


# --- calls that must be


def test_a_named_function_gets_arguments_of_its_schema(tmp_path: Path) -> None:
    folder = write_toy_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text("{# tools <tool_call> #}{{ messages[0].content }}")
    with live_server(toy_client(folder)) as server:
        fields = body(tool_choice={"type": "function", "function": {"name": "f"}}, max_tokens=60, temperature=0)
        fields["messages"][0]["content"] = "abc"
        (choice,) = server.http.post(PATH, json=fields).json()["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "f")
        assert 0 <= json.loads(call["function"]["arguments"])["a"] <= 9


def test_a_required_call_is_a_list_of_calls_each_of_its_own_schema(tmp_path: Path) -> None:
    tiny = write_byte_level(tmp_path)
    grammars = grammars_of(tiny)
    refs = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/x"}},
        "required": ["x"],
        "$defs": {"x": {"const": 7}},
    }
    refs["additionalProperties"] = False
    offered = [
        Tool.model_validate(F),
        Tool.model_validate({"type": "function", "function": {"name": "h", "parameters": refs}}),
    ]
    for seed in range(6):
        grammar = tools.grammar(offered, "required", is_single=seed % 2 == 0)
        assert grammar is not None
        text = noise_answer(grammars, tiny, grammar, seed)
        assert text is not None
        parser = required_parser(["f", "h"])
        calls = parser.push(text) + parser.finish()
        assert calls
        assert len(calls) == 1 or seed % 2
        for call in calls:
            assert isinstance(call, ToolCall)
            arguments = json.loads(call.arguments)
            assert arguments == {"x": 7} if call.name == "h" else 0 <= arguments["a"] <= 9


# --- which format


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|>", "llama3_json"),
        ("{{ tools }}", None),
        ("<tool_call>", None),
        (None, None),
    ],
)
def test_the_format_is_what_the_template_writes(template: str | None, form: str | None) -> None:
    assert format_of(template, None) == form


def test_an_operator_knows_better() -> None:
    assert format_of("{{ tools }} <tool_call>", "mistral") == "mistral"
    assert format_of("no place for any", "mistral") is None
