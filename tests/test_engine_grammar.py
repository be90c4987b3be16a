"""Grammars: what is refused at the door, what the masks let through, and answers that always have their form."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import GrammarRefused
from engine.grammar import MAX_COMPILED, MAX_GRAMMAR_CHARS, Grammars, check_grammar
from engine.sampling import Sampler
from engine.types import GenerateRequest, Grammar, SamplingParams
from engine.wire import Submit, decode_to_engine, encode
from support.grammar_noise import PROMPT, VOCAB, answer, grammars_of
from support.json_schemas import conforms, schemas
from support.tiny_tokenizer import TinyTokenizer, write_byte_level, write_sentencepiece

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[write_byte_level, write_sentencepiece], ids=["byte-level", "sentencepiece"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyTokenizer:
    tokenizer: TinyTokenizer = request.param(tmp_path_factory.mktemp("tiny"), ["true", '{"', '":', " \n", "}}"])
    return tokenizer


@pytest.fixture(scope="module")
def grammars(tiny: TinyTokenizer) -> Grammars:
    return grammars_of(tiny)


def json_schema(schema: dict[str, Any], *, is_compact: bool = False) -> Grammar:
    return Grammar("json", json.dumps(schema), is_compact)


# --- at the door


@pytest.mark.parametrize(
    "grammar",
    [
        json_schema({"type": "wurst"}),
        json_schema({"not": {}}),
        json_schema({"$ref": "#"}),
        json_schema({"$ref": "http://localhost:1/schema"}),
        json_schema({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}),
        json_schema({"type": "string", "format": "nobody knows"}),
        json_schema({"type": "string", "pattern": "("}),
        Grammar("json", '{"anyOf":[' * 200 + "{}" + "]}" * 200),
        Grammar("json", '{"type": "obj'),
        Grammar("json", '{"const": "\\ud800"}'),
        Grammar("regex", "("),
        Grammar("regex", "(?=a)b"),
        Grammar("regex", r"(a)\1"),
        Grammar("regex", "(" * 20_000 + ")" * 20_000),
        Grammar("regex", "\ud800"),
        Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1)),
        Grammar("lark", "nonsense"),
        Grammar("lark", "start: x"),
        Grammar("lark", "start: start"),
        Grammar("lark", "start: " + "(" * 20_000),
        Grammar("lark", "root ::= " + "(" * 20_000),
    ],
    ids=lambda grammar: f"{grammar.kind} {grammar.text[:24]!a}",
)
def test_api_20_a_bad_form_is_refused_with_a_reason_in_one_line(grammar: Grammar) -> None:
    started = time.monotonic()
    with pytest.raises(GrammarRefused) as refused:
        check_grammar(grammar)
    assert time.monotonic() - started < 1.0
    assert 0 < len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a+)+b"),
        Grammar("regex", "(a|b)*a(a|b){30}"),
        Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"),
        Grammar("regex", r"(\w{1,500}\s){1,500}"),
        Grammar("regex", "|".join(f"w{i}" for i in range(9000))),
        Grammar("lark", "start: a{1,1000000}\na: start | /(x+)+/"),
        json_schema({"type": "string", "pattern": "^(a+)+$", "minLength": 10_000}),
        json_schema({"type": "array", "items": {"type": "string"}, "minItems": 10**6}),
        json_schema({"enum": [f"value {i}" for i in range(4000)]}),
        json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
        json_schema({"allOf": [{"anyOf": [{"minimum": i + j} for j in range(8)]} for i in range(8)]}),
    ],
    ids=lambda grammar: f"{grammar.kind} {grammar.text[:24]!a}",
)
def test_s4_a_hostile_form_costs_a_bounded_time_at_the_door_and_in_the_engine(
    grammar: Grammar, grammars: Grammars
) -> None:
    started = time.monotonic()
    try:
        check_grammar(grammar)
        matcher = grammars.matcher(grammar)
        for _ in range(20):
            (mask,) = grammars.fill([matcher])
            if matcher.error is not None:
                break
            matcher.take(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]))
    except GrammarRefused:
        pass
    assert time.monotonic() - started < 3.0


# --- what the masks let through


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[a-c]{2,4}x?"), "[a-c]{2,4}x?"),
        (Grammar("regex", "^(yes|no)$"), "yes|no"),
        (Grammar("choice", json.dumps(["a.c", "(", "é\n", "a b"])), r"a\.c|\(|é\n|a b"),
        (Grammar("lark", 'start: "<" inner ">"\ninner: /[0-9]{1,3}/ | start'), "<+[0-9]{1,3}>+"),
        (Grammar("lark", 'root ::= "a" | "b" root'), "b*a"),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_an_answer_of_noise_has_the_form(
    grammars: Grammars, tiny: TinyTokenizer, grammar: Grammar, pattern: str
) -> None:
    answers = {answer(grammars, tiny, grammar, seed) for seed in range(8)}
    assert all(re.fullmatch(pattern, text or "?") for text in answers), answers
    assert len(answers) > 1


@settings(max_examples=25, deadline=None)
@given(schema=schemas(), seed=st.integers(0, 2**32), is_compact=st.booleans())
def test_any_schema_gets_json_that_conforms(
    grammars: Grammars, tiny: TinyTokenizer, schema: dict[str, Any], seed: int, is_compact: bool
) -> None:
    text = answer(grammars, tiny, json_schema(schema, is_compact=is_compact), seed)
    assert text is not None
    assert conforms(json.loads(text), schema)
    if is_compact:
        assert not set(re.sub(r'"([^"\\]|\\.)*"', "", text)) & set(" \n\r\t")


def test_a_finished_grammar_allows_the_end_alone_and_an_unfinished_one_forbids_it(
    grammars: Grammars, tiny: TinyTokenizer
) -> None:
    matcher = grammars.matcher(Grammar("regex", "ab?"))
    allowed = []
    for text in ("a", "b"):
        allowed.append(ids_of(grammars.fill([matcher])[0]))
        matcher.take(*tiny.ids(text))
    allowed.append(ids_of(grammars.fill([matcher])[0]))
    assert allowed == [{*tiny.ids("a")}, {*tiny.ids("b"), tiny.eos_id}, {tiny.eos_id}]


def ids_of(mask: np.ndarray[Any, np.dtype[np.int32]]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_rows_without_a_grammar_are_untouched_beside_one(grammars: Grammars, tiny: TinyTokenizer) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = (np.arange(3), np.full(3, len(PROMPT)), np.zeros(3, np.int64), np.full(3, PROMPT[-1]))
    drawn = []
    for grammar in (None, Grammar("regex", "[xy]")):
        sampler = Sampler(VOCAB, CPU, 3, grammars)
        for slot in range(3):
            params = SamplingParams(grammar=grammar if slot == 1 else None, logprobs=2 if slot == 2 else None)
            sampler.open(slot, params, seed=slot, prompt=PROMPT)
        drawn.append(sampler.sample(logits, *rows).collect())
    (a, _, c), (d, e, f) = drawn
    assert (a, c) == (d, f)
    assert e[0] in tiny.ids("x", "y")


def test_logprobs_of_a_grammar_row_are_of_the_model(grammars: Grammars, tiny: TinyTokenizer) -> None:
    sampler = Sampler(VOCAB, CPU, 1, grammars)
    grammar = Grammar("regex", "x")
    sampler.open(0, SamplingParams(temperature=0, grammar=grammar, logprobs=1), seed=0, prompt=PROMPT)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.0
    sampled = sampler.sample(logits, np.array([0]), np.array([3]), np.array([0]), np.array([3]))
    ((token_id, logprobs),) = sampled.collect()
    assert (token_id,) == tiny.ids("x")
    assert logprobs is not None
    assert logprobs.top[0][0] == 7
    assert logprobs.logprob == pytest.approx(float(logits[0].log_softmax(-1)[token_id]))


def test_a_ban_yields_where_the_grammar_leaves_nothing_else(grammars: Grammars, tiny: TinyTokenizer) -> None:
    (x,) = tiny.ids("x")
    sampler = Sampler(VOCAB, CPU, 1, grammars)
    sampler.open(0, SamplingParams(grammar=Grammar("regex", "x"), logit_bias=((x, -100.0),)), seed=0, prompt=PROMPT)
    sampled = sampler.sample(torch.zeros(1, VOCAB), np.array([0]), np.array([3]), np.array([0]), np.array([3]))
    assert sampled.ids.tolist() == [x]


def test_a_grammar_that_fails_on_the_way_is_an_error_of_its_row_alone(grammars: Grammars, tiny: TinyTokenizer) -> None:
    sampler = Sampler(VOCAB, CPU, 2, grammars)
    for slot in range(2):
        sampler.open(slot, SamplingParams(grammar=Grammar("regex", "a+b")), seed=0, prompt=PROMPT)
    fed = np.array([*tiny.ids("a"), *tiny.ids("z")])  # z: no mask would have let it through
    sampler.sample(torch.zeros(2, VOCAB), np.arange(2), np.full(2, 3), np.zeros(2, np.int64), fed)
    sampled = sampler.sample(torch.zeros(2, VOCAB), np.arange(2), np.full(2, 4), np.zeros(2, np.int64), fed)
    assert set(sampled.errors) == {1}
    assert sampled.ids[0].item() in tiny.ids("a", "b")


# --- compiled once, kept within bounds


def test_a_grammar_is_compiled_once_and_no_more_than_a_few_are_kept(tmp_path: Path) -> None:
    grammars = grammars_of(write_byte_level(tmp_path))
    first = Grammar("regex", "a")
    assert grammars.prepare(first) is grammars.prepare(first)
    before = grammars.prepare(first)
    for count in range(MAX_COMPILED):
        grammars.prepare(Grammar("regex", f"b{{{count + 1}}}")).result()
    assert grammars.prepare(first) is not before
    assert grammars.matcher(first, tuple(b"a")).error is None


def test_a_matcher_made_from_generated_tokens_goes_on_as_the_first_one_did(
    grammars: Grammars, tiny: TinyTokenizer
) -> None:
    grammar = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    whole, drawn = grammars.matcher(grammar), []
    for text in ('{"', "a", '":', "1", "2"):
        assert np.array_equal(grammars.fill([whole]), grammars.fill([grammars.matcher(grammar, drawn)]))
        drawn += tiny.ids(text)
        whole.take(drawn[-1])


def test_a_grammar_reaches_an_engine_in_another_process_as_data() -> None:
    sampling = SamplingParams(grammar=Grammar("json", '{"const": "\\u00e9"}', is_compact=True))
    message = Submit(GenerateRequest("a", (1,), sampling=sampling))
    assert decode_to_engine(encode(message)) == message
