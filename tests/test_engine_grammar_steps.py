"""Grammars in the engine's turn: when their sessions run, what overlaps, compiling, forks, preemption."""

from concurrent.futures import Future

import pytest

from engine.errors import GrammarRefused
from engine.loop import GRAMMAR_COMPILE_S
from engine.types import Grammar
from support.looped import Engine
from support.scripted import ScriptedExecutor
from support.toy_decoder import ToyDecoder
from support.toy_executor import toy_executor
from support.toy_server import EOS, Overlapping, ids, text, toy_grammars, write_toy_tokenizer

LIST = Grammar("regex", r"\[[0-9]{1,2}(,[0-9]{1,2}){3,5}\]")
HELD = {"grammar": LIST, "stop_token_ids": (EOS,)}


class Compiler:
    """`Preparing` by hand."""

    def __init__(self):
        self.futures = []

    def prepare(self, grammar):
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture(params=[False, True], ids=["back-to-back", "overlapped"])
def overlaps(request):
    return request.param


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    return toy_grammars(write_toy_tokenizer(tmp_path_factory.mktemp("toy")))


def toy_engine(grammars, overlaps, *, cells=255, seqs=4, **options):
    executor = toy_executor(ToyDecoder(), grammars=grammars, capacity_cells=cells, max_dynamic=16)
    return Engine(Overlapping(executor) if overlaps else executor, seqs=seqs, grammars=grammars, **options)


def holds_no_cells(engine):
    engine.loop.reset_prefix_cache()
    return engine.executor.free_cells == engine.executor.total_cells


def is_list(answer):
    numbers = answer.removeprefix("[").removesuffix("]").split(",")
    return answer == f"[{','.join(numbers)}]" and 4 <= len(numbers) <= 6 and all(n.isdigit() for n in numbers)


# --- when they run


def test_a_grammars_token_is_on_the_host_before_the_next_is_drawn_and_others_overlap_as_before():
    engine = Engine(ScriptedExecutor(overlaps=True))
    engine.submit("held", (5,), max_new_tokens=4, sampling={"grammar": LIST})
    engine.submit("free", (100,), max_new_tokens=8)
    engine.run()
    assert (engine.tokens("held"), engine.tokens("free")) == ([6, 7, 8, 9], list(range(101, 109)))
    fed = {1: [], 2: []}
    for batch in engine.executor.batches:
        for chunk in batch.chunks:
            fed[chunk.session_id] += chunk.tokens
    assert fed == {1: [5, 6, 7, 8], 2: [100] + [-1] * 7}
    assert len(engine.executor.batches) == 8, "the free one missed no step"


def test_a_grammar_alone_takes_one_step_a_token(overlaps):
    engine = Engine(ScriptedExecutor(overlaps=overlaps))
    engine.submit("held", (5,), max_new_tokens=4, sampling={"grammar": LIST})
    engine.run()
    assert [batch.chunks[0].tokens for batch in engine.executor.batches] == [(5,), (6,), (7,), (8,)]
    assert engine.holds_nothing()


# --- what they draw


def test_every_choice_follows_the_grammar_and_bystanders_draw_what_they_draw_alone(grammars, overlaps):
    alone = toy_engine(grammars, overlaps)
    alone.submit("free", ids("12"), max_new_tokens=30, sampling={"seed": 3})
    alone.run()
    engine = toy_engine(grammars, overlaps)
    engine.submit("free", ids("12"), max_new_tokens=30, sampling={"seed": 3})
    engine.submit("held", ids("abc"), n=3, max_new_tokens=40, sampling={**HELD, "seed": 1, "logprobs": 1})
    engine.run()
    answers = [text(engine.tokens("held", index)) for index in range(3)]
    assert all(map(is_list, answers)), answers
    assert len(set(answers)) == 3, "each choice has a seed of its own"
    assert {engine.finish("held", index) for index in range(3)} == {"stop"}
    assert engine.tokens("free") == alone.tokens("free")
    assert holds_no_cells(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preempted_and_requeued_it_goes_on_as_if_nothing_had_happened(grammars, overlaps, temperature):
    sampling = {**HELD, "temperature": temperature, "seed": 7}
    answers = []
    for cells in (255, 24):
        engine = toy_engine(grammars, overlaps, cells=cells, budget=8, chunk=4)
        for name in ("a", "b", "c"):
            engine.submit(name, ids("12" + name), max_new_tokens=20, sampling=sampling)
        engine.run()
        answers.append([text(engine.tokens(name)) for name in "abc"])
        assert (engine.loop.stats().preemptions > 0) == (cells == 24)
        assert holds_no_cells(engine)
    assert answers[0] == answers[1]
    assert all(map(is_list, answers[0]))


def test_a_prompt_that_is_there_already_draws_the_same(grammars, overlaps):
    engine = toy_engine(grammars, overlaps)
    for name in ("first", "again"):
        engine.submit(name, ids("123123123"), max_new_tokens=40, sampling={**HELD, "seed": 2})
        engine.run()
    assert engine.cached("again") == 8
    assert engine.tokens("first") == engine.tokens("again")


def test_cancelled_halfway_its_place_is_free_for_another_grammar(grammars, overlaps):
    engine = toy_engine(grammars, overlaps, seqs=1)
    engine.submit("a", ids("1"), max_new_tokens=40, sampling=HELD)
    for _ in range(5):
        engine.step()
    engine.loop.cancel("a")
    engine.submit(
        "b", ids("2"), max_new_tokens=40, sampling={**HELD, "grammar": Grammar("choice", '["true", "false"]')}
    )
    engine.run()
    assert engine.finish("a") == "cancelled"
    assert text(engine.tokens("b")) in ("true", "false")


def test_a_grammar_that_the_model_cannot_spell_fails_its_choice_alone(grammars, overlaps):
    alone = toy_engine(grammars, overlaps)
    alone.submit("free", ids("12"), max_new_tokens=9, sampling={"seed": 3})
    alone.run()
    engine = toy_engine(grammars, overlaps)
    engine.submit("free", ids("12"), max_new_tokens=9, sampling={"seed": 3})
    engine.submit("held", ids("1"), n=2, max_new_tokens=9, sampling={**HELD, "grammar": Grammar("regex", "[0-9]{2}z")})
    engine.run()
    for index in range(2):
        assert len(engine.tokens("held", index)) == 2
        assert engine.of("held", index)[-1].error_code == "grammar_refused"
    assert engine.tokens("free") == alone.tokens("free")
    assert holds_no_cells(engine)


# --- while it is compiled


def test_others_run_while_a_grammar_is_compiled():
    compiler = Compiler()
    engine = Engine(ScriptedExecutor(), grammars=compiler)
    engine.submit("held", (5,), max_new_tokens=2, sampling={"grammar": LIST})
    engine.submit("free", (100,), max_new_tokens=2)
    for _ in range(3):
        engine.step()
    assert (engine.tokens("held"), engine.finish("free")) == ([], "length")
    assert engine.loop.stats().waiting == 1
    compiler.futures[0].set_result(None)
    engine.run()
    assert engine.tokens("held") == [6, 7]


def test_a_grammar_that_does_not_compile_fails_its_request_alone():
    compiler = Compiler()
    engine = Engine(ScriptedExecutor(), grammars=compiler)
    engine.submit("held", (5,), n=2, max_new_tokens=2, sampling={"grammar": LIST})
    engine.submit("free", (100,), max_new_tokens=2)
    compiler.futures[0].set_exception(GrammarRefused("it is too large"))
    engine.run()
    assert [(engine.of("held", i)[-1].error_code, engine.of("held", i)[-1].error) for i in range(2)] == [
        ("grammar_refused", "it is too large")
    ] * 2
    assert engine.tokens("free") == [101, 102]


def test_a_grammar_that_never_compiles_is_given_up():
    now = [0.0]
    engine = Engine(ScriptedExecutor(), grammars=Compiler(), clock=lambda: now[0])
    engine.submit("held", (5,), max_new_tokens=2, sampling={"grammar": LIST})
    engine.step()
    assert engine.updates == []
    now[0] = GRAMMAR_COMPILE_S + 1
    engine.run()
    assert engine.of("held")[-1].error_code == "grammar_refused"


def test_one_that_is_cancelled_while_it_is_compiled_never_runs():
    compiler = Compiler()
    engine = Engine(ScriptedExecutor(), grammars=compiler)
    engine.submit("held", (5,), max_new_tokens=2, sampling={"grammar": LIST})
    engine.loop.cancel("held")
    compiler.futures[0].set_result(None)
    engine.run()
    assert engine.finish("held") == "cancelled"
    assert engine.executor.batches == []
