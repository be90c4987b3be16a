import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel, ValidationError

from engine.types import GenerationDefaults, SamplingParams
from server import errors, extra_fields, schemas
from server.errors import ApiError
from server.schemas import ChatBody, CompletionBody
from server.text import Text
from support.scripted import scripted_info
from support.tiny_tokenizer import write_byte_level

INFO = scripted_info(max_model_len=2048)
NO_TEXT = Text(None)


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], body: dict[str, Any]) -> Model:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise errors.from_validation(error.errors(), body) from error


def completion(**fields: Any) -> CompletionBody:
    """As the server reads it: from JSON."""
    return validated(CompletionBody, json.loads(json.dumps({"prompt": "q"} | fields)))


def chat(**fields: Any) -> ChatBody:
    return validated(ChatBody, {"messages": [{"role": "user", "content": "hi"}]} | fields)


def sampling(body: CompletionBody, text: Text = NO_TEXT, **info: Any) -> SamplingParams:
    return schemas.sampling_params(
        body, scripted_info(**info), text, logprobs=body.logprobs, prompt_logprobs=body.prompt_logprobs
    )


def refusal(make: Callable[[], object]) -> ApiError:
    """The error a client gets."""
    try:
        make()
    except ApiError as error:
        return error
    raise AssertionError("it was accepted")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ("ab",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ("", ("",)),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        True,
        {},
        [],
        [[]],
        [[1], []],
        ["a", 1],
        [1, "a"],
        [[1], "a"],
        [[1], 2],
        [True],
        [7.0],
        ["a", ["b"]],
        ["\ud800"],
    ],
)
def test_other_prompts_and_mixtures_are_one_clear_400(prompt: Any) -> None:
    error = refusal(lambda: validated(CompletionBody, {"prompt": prompt}))
    assert (error.status, error.param, error.code) == (400, "prompt", "invalid_value")
    assert "\n" not in error.message


def test_a_missing_prompt_is_a_missing_field() -> None:
    assert refusal(lambda: validated(CompletionBody, {})).code == "missing_field"
    assert "prompt" in CompletionBody.model_json_schema()["required"]


RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    # field -> accepted values, refused ones
    "max_tokens": ([0, 1, 2000], [-1, 1.0, "1", True]),
    "n": ([1, 5], [0, -1, 1.5, True]),
    "temperature": ([0, 0.7, 2], [-0.1, 2.1, "1", float("nan"), True]),
    "top_p": ([0, 0.5, 1], [-0.1, 1.1]),
    "top_k": ([-1, 0, 40, 10**6], [-2, 1.5]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1, float("inf")]),
    "repetition_penalty": ([0.1, 1, 2], [0, -1]),
    "seed": ([0, -1, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.5, "7", True]),
    "logprobs": ([0, 20], [21, -1, True]),
    "prompt_logprobs": ([0, 20], [21, -1]),
    "min_tokens": ([0, 5], [-1]),
    "stop": (["x", [], ["a", "b", "c", "d"]], ["", [""], [1], 7, ["a"] * 5]),
    "stop_token_ids": ([[], [1]], [[-1], ["1"], [True], 1]),
    "allowed_token_ids": ([[1]], [[], [1.0]]),
    "logit_bias": (
        [{}, {"5": 100}, {"5": -100.0}],
        [{"5": 101}, {"5": "x"}, {"-1": 1}, {"abc": 1}, {"1.5": 1}, {"5": True}, [1], {str(i): 1 for i in range(1025)}],
    ),
    "bad_words": ([["x"]], [[""], [1], "x"]),
    "echo": ([True, False], [1, "true"]),
    "stream": ([True, False], [1]),
    "priority": ([-3, 0, 3], [1.5]),
    "best_of": ([1, 2], [0, 1.5, True]),
    "truncate_prompt_tokens": ([-1, 1, 50], [0, -2, 1.5, True]),
    "truncation_side": (["left", "right"], ["middle", 1]),
    "timeout": ([0.5, 30], [0, -1]),
    "user": (["me"], [7]),
    "cache_salt": (["s"], ["", 7]),
}


@pytest.mark.parametrize("field", RANGES)
def test_values_in_range_are_accepted_and_others_are_refused_by_name(field: str) -> None:
    accepted, refused = RANGES[field]
    for value in [None, *accepted]:
        completion(**{field: value})
    for value in refused:
        error = refusal(lambda: validated(CompletionBody, {"prompt": "q", field: value}))  # noqa: B023
        assert error.status == 400, value
        assert (error.param or "").partition("[")[0] == field, value


def test_null_is_the_same_as_left_out_for_every_field() -> None:
    nulls = {field: None for field in CompletionBody.model_fields if field != "prompt"}
    assert completion(**nulls).model_dump() == completion().model_dump()
    nulls = {field: None for field in ChatBody.model_fields if field != "messages"}
    assert chat(**nulls).model_dump() == chat().model_dump()


def test_b09_zero_is_not_absent() -> None:
    params = sampling(completion(logprobs=0, seed=0, temperature=0), defaults=GenerationDefaults(temperature=0.6))
    assert (params.logprobs, params.seed, params.temperature) == (0, 0, 0.0)
    assert completion(max_tokens=0).token_limit == 0
    assert refusal(lambda: chat(top_logprobs=3)).param == "top_logprobs"
    assert refusal(lambda: chat(top_logprobs=3, logprobs=False)).param == "top_logprobs"


def test_the_models_own_defaults_hold_where_a_field_is_absent() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    absent = sampling(completion(), defaults=defaults)
    assert (absent.temperature, absent.top_p, absent.top_k, absent.min_p) == (0.6, 0.9, 20, 0.1)
    assert absent.repetition_penalty == 1.1
    given = sampling(completion(temperature=1, top_p=1, top_k=-1, min_p=0, repetition_penalty=1), defaults=defaults)
    assert given == sampling(completion())


def test_tiny_temperatures_are_greedy_and_top_k_of_the_whole_vocabulary_is_off() -> None:
    params = sampling(completion(temperature=1e-6, top_k=1000))
    assert (params.temperature, params.top_k) == (0.0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"1000": 1}},
        {"logit_bias": {"1040": 1}},
        {"stop_token_ids": [1000]},
        {"allowed_token_ids": [1000]},
    ],
)
def test_b11_ids_outside_the_vocabulary_are_refused_by_name(fields: dict[str, Any]) -> None:
    error = refusal(lambda: sampling(completion(**fields)))
    assert (error.status, error.param) == (400, next(iter(fields)))
    assert "0 to 999" in error.message
    assert "1000" in error.message or "1040" in error.message


@pytest.mark.parametrize(("fields", "param"), [
    ({"allowed_token_ids": [10, 11], "logit_bias": {"10": -100, "11": -100}}, "allowed_token_ids"),
    ({"allowed_token_ids": [10, 11], "stop_token_ids": [10, 11, 12], "min_tokens": 1}, "min_tokens"),
    ({"allowed_token_ids": [1, 2], "logit_bias": {"1": -100}, "stop_token_ids": [2], "min_tokens": 1}, "min_tokens"),
    ({"allowed_token_ids": [10, 11], "logit_bias": {"10": -99}, "stop_token_ids": [11], "min_tokens": 1}, None),
    ({"allowed_token_ids": [10, 11], "logit_bias": {"10": -100}}, None),
    ({"allowed_token_ids": [10], "stop_token_ids": [10]}, None),
])  # fmt: skip
def test_limits_that_leave_no_token_to_draw_are_refused(fields: dict[str, Any], param: str | None) -> None:
    body = completion(**fields)
    if param is None:
        sampling(body)
        return
    with pytest.raises(ApiError) as refused:
        sampling(body)
    assert refused.value.param == param


def test_b11_the_last_valid_id_is_accepted() -> None:
    params = sampling(completion(logit_bias={"999": 5}, stop_token_ids=[999], allowed_token_ids=[999, 1]))
    assert params.logit_bias == ((999, 5.0),)
    assert params.allowed_token_ids == (1, 999)
    schemas.check_prompt([999], INFO, "prompt")
    assert refusal(lambda: schemas.check_prompt([3, 1000], INFO, "prompt")).param == "prompt"


def test_end_of_text_is_among_the_stop_tokens_unless_ignored() -> None:
    assert sampling(completion(stop_token_ids=[5]), eos_token_ids=(0, 2)).stop_token_ids == (5, 0, 2)
    assert sampling(completion(stop_token_ids=[5], ignore_eos=True), eos_token_ids=(0, 2)).stop_token_ids == (5,)


def test_bad_words_are_forbidden_at_the_beginning_and_behind_a_space(tmp_path: Path) -> None:
    tokenizer = write_byte_level(tmp_path, ["no"])
    params = sampling(completion(bad_words=["no"]), Text(str(tokenizer.folder)))
    assert params.bad_words == (tuple(b"no"), tuple(b" no"))
    assert refusal(lambda: sampling(completion(bad_words=["no"]))).param == "bad_words"


@pytest.mark.parametrize(
    ("prompt_tokens", "fields", "expected"),
    [
        (8, {"max_tokens": 2039}, 2039),
        (8, {"max_tokens": 2040}, 2040),
        (2047, {}, 1),
        (8, {}, 16),
        (2048, {"max_tokens": 0}, 0),
    ],
)
def test_b14_what_fits_the_context_is_admitted(prompt_tokens: int, fields: dict[str, Any], expected: int) -> None:
    assert schemas.new_tokens(completion(**fields), prompt_tokens, INFO, 16, "prompt") == expected


@pytest.mark.parametrize(
    ("prompt_tokens", "fields"), [(8, {"max_tokens": 2041}), (2048, {}), (2049, {"max_tokens": 0})]
)
def test_b14_overflow_is_a_400_with_the_numbers(prompt_tokens: int, fields: dict[str, Any]) -> None:
    error = refusal(lambda: schemas.new_tokens(completion(**fields), prompt_tokens, INFO, 16, "prompt"))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.extra == {"n_prompt_tokens": prompt_tokens, "n_ctx": 2048}
    for number in (2048, prompt_tokens, *fields.values()):
        assert str(number) in error.message


def test_overflow_may_be_clamped_where_there_is_room_at_all() -> None:
    clamped: Callable[[int, dict[str, Any]], int] = lambda prompt, fields: schemas.new_tokens(  # noqa: E731
        completion(**fields), prompt, INFO, 16, "prompt", clamps=True
    )
    assert clamped(8, {"max_tokens": 5000}) == 2040
    assert clamped(8, {"max_tokens": 5}) == 5
    assert clamped(8, {"max_tokens": 0}) == 0
    assert clamped(8, {}) == 16
    assert refusal(lambda: clamped(2048, {"max_tokens": 1})).code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 3}, [2, 3, 4]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 6}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 8}, [3, 4]),
        ({"truncate_prompt_tokens": -1}, [4]),
    ],
)
def test_a_prompt_is_cut_at_the_side_that_is_asked_for(fields: dict[str, Any], kept: list[int]) -> None:
    info = scripted_info(max_model_len=10)
    assert schemas.truncated(completion(**fields), [1, 2, 3, 4], info, 16) == kept


def test_strict_params_refuse_what_nobody_knows() -> None:
    error = refusal(lambda: extra_fields.check(completion(foo=1), is_strict=True))
    assert (error.status, error.code, error.param) == (400, "unknown_parameter", "foo")


def test_a_chat_may_fill_the_rest_of_the_context() -> None:
    assert schemas.new_tokens(chat(), 48, INFO, None, "messages") == 2000
    assert schemas.new_tokens(chat(max_completion_tokens=5), 48, INFO, None, "messages") == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(lambda: completion(**fields)).param == param


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    fields = {"suffix": None, "use_beam_search": False, "response_format": {"type": "text"}, "best_of": None}
    assert extra_fields.check(completion(**fields)) == {}
    assert extra_fields.check(chat(tools=[], tool_choice="auto", functions=None, store=False)) == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (completion(suffix="x"), "suffix"),
        (completion(use_beam_search=True), "use_beam_search"),
        (completion(regex="a+"), "regex"),
        (completion(guided_json={}), "guided_json"),
        (completion(prompt_embeds="x"), "prompt_embeds"),
        (completion(logprob_token_ids=[7]), "logprob_token_ids"),
        (chat(thinking_token_budget=8), "thinking_token_budget"),
        (chat(return_prompt_text=True), "return_prompt_text"),
        (chat(functions=[{"name": "f"}]), "functions"),
        (chat(chat_template="x"), "chat_template"),
        (chat(modalities=["audio"]), "modalities"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(body: Any, param: str) -> None:
    error = refusal(lambda: extra_fields.check(body))
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", param)


def test_fields_nobody_knows_are_reported_in_a_header_that_they_cannot_break() -> None:
    body = completion(**{"foo": 1, "b,\r\nX-Evil: 1": 2})
    assert extra_fields.check(body) == {"x-ignored-params": "foo,b???X-Evil:?1"}


def test_an_unknown_model_is_a_404_and_none_is_the_default() -> None:
    assert schemas.check_model(completion(), ["a", "b"]) == "a"
    assert schemas.check_model(completion(model="b"), ["a", "b"]) == "b"
    assert refusal(lambda: schemas.check_model(completion(model="c"), ["a", "b"])).status == 404


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        [{}],
        ["hi"],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "robot", "content": "hi"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "hi"}] * 4097,
    ],
)
def test_bad_messages_are_a_400_that_names_them(messages: Any) -> None:
    error = refusal(lambda: validated(ChatBody, {"messages": messages}))
    assert error.status == 400
    assert (error.param or "").startswith("messages")


def test_parts_of_text_become_one_text_and_other_parts_are_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].for_template()["content"] == "ab"
    image = chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert refusal(image.messages[0].for_template).code == "unsupported_parameter"


def test_other_fields_of_a_message_reach_the_template() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": {}}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert chat(messages=[message]).messages[0].for_template() == message | {"content": ""}
