"""A model of letters: each token is a hash of all before it and of the seed, so that one lost, doubled or wrong shows.

Token ids are bytes, as `write_byte_level` of support/tiny_tokenizer.py has them. What a request gets can be computed
without an engine: `text_of`. An engine process of it: model "letters" of support/scripted_process.py.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

FIRST, NUM_LETTERS = ord("a"), 26


def next_letter(prompt: tuple[int, ...], generated: tuple[int, ...], seed: int) -> int:
    """An `Answer` of support/scripted.py. A seed is used as a signed 64-bit value, as choices have it."""
    crc = zlib.crc32(seed.to_bytes(8, "little", signed=True))
    return FIRST + zlib.crc32(array("I", prompt + generated).tobytes(), crc) % NUM_LETTERS


def text_of(prompt: str | Sequence[int], seed: int, max_tokens: int, stop: str | None = None) -> tuple[str, str]:
    """-> the text and the finish reason of a choice with this seed."""
    prompt_ids = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
    generated: tuple[int, ...] = ()
    for _ in range(max_tokens):
        generated += (next_letter(prompt_ids, generated, seed),)
        if stop is not None and bytes(generated).endswith(stop.encode()):
            return bytes(generated).decode().removesuffix(stop), "stop"
    return bytes(generated).decode(), "length"
