"""Chunk keys: the same only where everything that decides a chunk's bytes is the same."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.geometry import Geometry, InvalidConfig, LayerGeometry, Reach
from cache.offload.chunks import (
    KEY_BYTES,
    ChunkChain,
    Namespace,
    chunks_of,
    fitting_chunk_tokens,
    geometry_record,
)

SPACE = Namespace(weights="sha-1", dtype="bfloat16", geometry="2x64+64", rope="theta=1e4")
TOKENS = np.arange(100)


def keys(space: Namespace, tokens: np.ndarray, chunk_tokens: int = 16) -> list[bytes]:
    return [chunk.key for chunk in chunks_of(space, tokens, chunk_tokens)]


def test_only_whole_chunks_have_keys() -> None:
    assert [len(keys(SPACE, TOKENS[:n])) for n in (0, 15, 16, 31, 32, 100)] == [0, 0, 1, 1, 2, 6]


def test_a_key_is_the_same_in_every_process() -> None:
    """Pinned: what an earlier version stored must be found, or the format number must change."""
    assert keys(SPACE, TOKENS[:16])[0].hex() == "6cda2da2b4f0689473dad080f5ea3b5e"
    assert len(keys(SPACE, TOKENS[:16])[0]) == KEY_BYTES


def test_prompts_share_keys_as_far_as_they_share_whole_chunks() -> None:
    other = TOKENS.copy()
    other[40] += 1
    mine, theirs = keys(SPACE, TOKENS), keys(SPACE, other)
    assert mine[:2] == theirs[:2]
    assert not set(mine[2:]) & set(theirs[2:])


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
def test_any_field_of_the_namespace_separates(name: str) -> None:
    changed = replace(SPACE, **{name: 2 if name == "format" else "another"})
    assert not set(keys(SPACE, TOKENS)) & set(keys(changed, TOKENS))
    assert (changed.digest == SPACE.digest) == (name == "salt")


def test_the_record_is_readable_and_fields_cannot_run_into_each_other() -> None:
    assert json.loads(SPACE.record)["rope"] == "theta=1e4"
    shifted = replace(SPACE, weights='sha-1","x":"', dtype="bfloat16")
    assert shifted.root != SPACE.root


@given(cuts=st.lists(st.integers(0, 100), max_size=6))
def test_a_chain_that_grows_in_pieces_has_the_keys_of_the_whole(cuts: list[int]) -> None:
    chain = ChunkChain(SPACE, 16)
    edges = [0, *sorted(cuts), 100]
    completed = [chunk for start, end in pairwise(edges) for chunk in chain.extend(TOKENS[start:end])]
    assert [chunk.key for chunk in completed] == keys(SPACE, TOKENS)
    assert [chunk.index for chunk in chain.chunks] == list(range(6))
    assert np.concatenate([chunk.tokens for chunk in chain.chunks]).tolist() == list(range(96))
    assert [chunk.parent for chunk in chain.chunks] == [SPACE.root, *keys(SPACE, TOKENS)[:-1]]


@given(counts=st.lists(st.integers(0, 6), max_size=6))
def test_a_chain_is_hashed_as_far_as_it_is_asked_for(counts: list[int]) -> None:
    chain = ChunkChain(SPACE, 16)
    for number, count in enumerate(counts, 1):
        assert [chunk.key for chunk in chain.reach(TOKENS, count)] == keys(SPACE, TOKENS)[:count]
        assert len(chain.chunks) == max(counts[:number])


@pytest.mark.parametrize("bad", [-1, 1 << 32])
def test_an_id_that_does_not_fit_is_refused_and_nothing_is_appended(bad: int) -> None:
    chain = ChunkChain(SPACE, 16)
    with pytest.raises(ValueError, match="do not fit 32 bits"):
        chain.extend([1, bad])
    chain.extend(TOKENS[:16])
    assert [chunk.key for chunk in chain.chunks] == keys(SPACE, TOKENS[:16])


@pytest.mark.parametrize("length", [0, 8, 48, 512])
def test_a_chunk_length_is_a_power_of_two_from_16_to_256(length: int) -> None:
    with pytest.raises(InvalidConfig, match=f"a chunk of {length} tokens"):
        ChunkChain(SPACE, length)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(32, 64), (16, 64), (1, 256), (4, 64), (2, 128)],
)
def test_a_small_model_gets_longer_chunks(layers: int, expected: int) -> None:
    """4 KiB a token and layer: 64 tokens of 4 layers are 1 MiB."""
    geometry = Geometry((LayerGeometry(8, 128, 128),) * layers)
    assert fitting_chunk_tokens(geometry, torch.bfloat16) == expected


def test_a_geometry_record_tells_reaches_and_widths_apart() -> None:
    records = {
        geometry_record(Geometry(layers))
        for layers in (
            (LayerGeometry(2, 4, 4),),
            (LayerGeometry(4, 2, 2),),
            (LayerGeometry(2, 4, 2),),
            (LayerGeometry(2, 4, 4, Reach("window", 8)),),
            (LayerGeometry(2, 4, 4, Reach("chunk", 8)),),
            (LayerGeometry(2, 4, 4),) * 2,
        )
    }
    assert len(records) == 6
