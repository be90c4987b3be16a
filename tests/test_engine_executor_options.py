"""EXE-1, EXE-3, EXE-4, EXE-6..10: the limits an executor is created within, and what it says of itself."""

import pytest
import torch

from engine.create import create_executor, load_executor
from engine.errors import ConfigError, ModelError
from engine.executor_options import MIN_SEQUENCES, ExecutorOptions, derive
from engine.types import Batch, Chunk
from static_graphs.additional import AdditionalMethod
from support.model_folder import write_folder
from support.toy_decoder import CONTEXT, VOCAB, ToyDecoder
from support.toy_executor import GREEDY, METHODS, generate, toy_executor


def options(**changes):
    """64 cells: a pool of 65 rows, one of them scratch."""
    return ExecutorOptions(**({"capacity_cells": 64, "widths": (1, 2, 4), "max_dynamic": 32} | changes))


def plan(context=CONTEXT, **changes):
    return derive(options(**changes), context=context, dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "max_session_tokens"),
    [
        ({"max_sessions": 4}, 16),
        ({"max_sessions": 3}, 21),
        ({"max_sessions": 1, "capacity_cells": 200}, CONTEXT),
        ({"max_sessions": 4, "reserves_cells": False}, 64),
        ({"max_sessions": 4, "max_session_tokens": 16}, 16),
        ({"max_sessions": 5, "max_session_tokens": 60, "reserves_cells": False}, 60),
    ],
)
def test_exe_7_session_tokens_are_as_asked_or_the_pool_divided_within_the_context(changes, max_session_tokens):
    """D10: reserving is the executor's own default; the server admits optimistically."""
    assert plan(**changes).max_session_tokens == max_session_tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"widths": ()}, "at least one static method"),
        ({"widths": (0, 1)}, "forward_0 is no method"),
        ({"max_dynamic": 4}, "forward_others takes 4 tokens: it must be wider than forward_4"),
        ({"max_dynamic": 65}, "capacity_cells is 64: the widest step, forward_others, takes 65 cells"),
        ({"min_selected_rows": 0}, r"min_selected_rows is 0: it must be in \[1, 32\]"),
        ({"min_selected_rows": 33}, r"min_selected_rows is 33: it must be in \[1, 32\]"),
        ({"initial_capacity": 0}, "initial_capacity is 0: it must be at least 1"),
        ({"max_sessions": 0}, "max_sessions is 0: it must be at least 1"),
        ({"max_session_tokens": -1}, "max_session_tokens is -1"),
        ({"max_session_tokens": 65}, "max_session_tokens is 65: the model's context is 64 tokens"),
        (
            {"max_sessions": 5, "max_session_tokens": 13},
            "5 sessions of 13 tokens reserve 65 cells: the pool has 64. Use at most 12 tokens each",
        ),
        ({"capacity_cells": 2**31 - 1}, "capacity_cells is 2147483647: at most 2147483646 can be addressed"),
        ({"max_sessions": 65}, "65 sessions divide 64 cells: none is left for each"),
        ({"max_sessions": 5, "max_sequences": 4}, "max_sessions is 5: the cache has ids for 4 sequences"),
        ({"additional_methods": (AdditionalMethod("forward_2", lambda: None),)}, "two methods named 'forward_2'"),
    ],
)
def test_exe_3_to_7_what_cannot_be_kept_is_refused_with_its_numbers(changes, words):
    with pytest.raises(ConfigError, match=words):
        plan(**changes)


def test_exe_8_and_9_defaults_and_the_cache_derived_from_them():
    derived = plan()
    assert [method.name for method in derived.methods] == ["forward_1", "forward_2", "forward_4", "forward_others"]
    assert (options().max_sessions, derived.cache.max_sequences) == (1, MIN_SEQUENCES)
    assert (derived.cache.capacity_cells, derived.cache.max_write, derived.cache.initial_cells) == (64, 32, 512)
    assert derived.cache.kv_dtype == torch.float32
    other = plan(initial_capacity=16, kv_dtype=torch.bfloat16, max_sessions=64, max_sequences=200).cache
    assert (other.initial_cells, other.kv_dtype, other.max_sequences) == (16, torch.bfloat16, 200)


def test_raw_6_an_executor_says_what_it_is():
    """EXE-11: `preferred_batch_tokens` is the widest width."""
    model = ToyDecoder()
    executor = toy_executor(model, max_sessions=3, max_session_tokens=50)
    assert executor.preferred_batch_tokens == 32
    assert (executor.max_sessions, executor.max_session_tokens, executor.vocab_size) == (3, 50, VOCAB)
    assert not executor.samples_on_device
    assert not executor.overlaps
    assert executor.model is model
    assert executor.kv_metrics() == executor.cache_control.metrics()
    assert [name for name, _ in executor.method_calls()] == [
        "forward_1",
        "forward_2",
        "forward_4",
        "forward_8",
        "forward_others",
    ]


def test_exe_8_all_methods_share_one_model_and_its_weights():
    model = ToyDecoder()
    executors = [toy_executor(model, **methods) for methods in METHODS.values()]
    before = [generate(executor, [(1, 2, 3)] * 3, 4) for executor in executors]
    model.head.weight.neg_()  # what one method reads, all of them do
    after = [generate(executor, [(1, 2, 3)] * 3, 4) for executor in executors]
    assert before[0] == before[1] != after[0] == after[1]
    assert after[0] == [model.continuation((1, 2, 3), 4)] * 3
    assert all(executor.model is model for executor in executors)


def test_exe_10_executors_made_differently_live_side_by_side():
    model = ToyDecoder()
    plain, tapped = toy_executor(model), toy_executor(model, tap_layers=(0, 1), widths=(3,))
    expected = model.continuation((1, 2, 3), 4)
    assert generate(plain, [(1, 2, 3)], 4) == generate(tapped, [(1, 2, 3)], 4) == [expected]
    assert dict(plain.method_calls())["forward_1"] == dict(tapped.method_calls())["forward_3"] - 1 == 3


def test_exe_8_k_v_may_be_stored_narrower_than_the_model_computes():
    executor = toy_executor(ToyDecoder(), kv_dtype=torch.bfloat16)
    assert executor.cache_control.pool.keys[0].dtype == torch.bfloat16
    assert len(generate(executor, [(1, 2, 3)], 4)[0]) == 4


def test_exe_4_the_head_never_sees_fewer_rows_than_forward_others_needs():
    seen = []

    class Watched(ToyDecoder):
        def logits(self, hidden):
            seen.append(hidden.shape[0])
            return super().logits(hidden)

    model = Watched()
    executor = toy_executor(model, **METHODS["sparse"])
    session = executor.open_session(GREEDY, seed=0, prompt=())
    output = executor.execute(Batch((Chunk(session, tuple(range(10)), 0, wanted_rows="last"),))).chunks[0]
    assert output.token_ids == (model.next_token(range(10)),)
    executor.execute(Batch((Chunk(session, (1,), 10, wanted_rows="last"),)))
    executor.execute(Batch((Chunk(session, (1, 2), 11),)))  # nothing asked for: no head at all
    assert seen == [5, 1]


def test_exe_8_additional_methods_run_by_name():
    state = torch.zeros(3)
    executor = toy_executor(ToyDecoder(), additional_methods=(AdditionalMethod("count", lambda: state.add_(1)),))
    executor.run_additional("count")
    executor.run_additional("count")
    assert state.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(KeyError):
        executor.run_additional("forward_1")


def test_taps_hear_only_the_forwards_of_their_own_executor():
    model = ToyDecoder()
    tapped, wide = toy_executor(model, tap_layers=(0,), max_dynamic=9), toy_executor(model)
    assert generate(wide, [range(32)], 1) == [[model.next_token(range(32))]]
    assert len(generate(tapped, [(1, 2)], 1)[0]) == 1


def test_a_layer_that_is_not_there_cannot_be_tapped():
    with pytest.raises(ConfigError, match="layer 2 cannot be tapped: the model has layers 0 to 1"):
        create_executor(ToyDecoder(), options(tap_layers=(0, 2)))


def test_a_closed_executor_leaves_its_model_as_it_found_it():
    model = ToyDecoder()
    executor = toy_executor(model, tap_layers=(1,))
    generate(executor, [(1, 2)], 2)
    executor.close()
    assert not any(layer._forward_hooks for layer in model.body.layers)


def test_an_executor_loads_its_model_by_path_and_taps_its_layers(tmp_path):
    executor = load_executor(write_folder(tmp_path), options(tap_layers=(0, 1)), max_model_len=40)
    assert executor.max_session_tokens == 40
    assert len(generate(executor, [(1, 2, 3)], 3)[0]) == 3
    executor.close()
    with pytest.raises(ModelError):
        load_executor(str(tmp_path / "nothing"), options())
