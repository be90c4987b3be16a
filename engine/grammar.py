"""Grammars that an answer must follow: checked at the door, compiled off the engine's loop, walked token by token.

Everything that knows llguidance. Torch-free: `check_grammar` runs in the process that speaks HTTP, `Grammars` and its
matchers in the engine's. llguidance's own limits bound the work of one compilation and of one mask; it lets go of the
interpreter's lock while it works, so other threads go on.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark
from numpy.typing import NDArray

from engine.errors import GrammarRefused
from engine.types import Grammar

MAX_GRAMMAR_CHARS = 64 * 1024
MAX_COMPILED = 32
"""Grammars kept beyond the requests that use them, least recently used first to go: each may grow to some 50 MB."""

_LIMITS = LLParserLimits(max_lexer_states=25_000, max_grammar_size=100_000, verbose_errors=False)
"""The others' defaults: about 20 ms for a lexer, 15 ms for a mask."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the parts of JSON. Bounded: a model may like spaces so much that it never comes to the point."""
_LONGEST_REASON = 300


def check_grammar(grammar: Grammar) -> None:
    """Raise GrammarRefused for what cannot be compiled, or matches nothing. Any thread; no model's tokens are needed.

    Takes as long as the limits allow: some 100 ms at the worst, usually 1.
    """
    _first_mask(_compiled(_BYTES, grammar))


class Grammars:
    """The compiled grammars of one model. Compiles on threads of its own; everything else is the engine thread's."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer_json: the file's text, where the bytes of each token come from. vocab_size: columns of the logits.

        Holds the interpreter's lock for about 4 us a token. Raises ValueError for a kind of tokenizer that llguidance
        does not know.
        """
        self.mask_words = (vocab_size + 31) // 32
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._filler = LLExecutor()
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()

    def prepare(self, grammar: Grammar) -> Future[LLMatcher]:
        """Begin to compile, unless that was done before. The future fails with GrammarRefused."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._workers.submit(self._compile, grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return future

    def matcher(self, grammar: Grammar, generated: Sequence[int] = ()) -> Matcher:
        """Where an answer stands that has `generated` so far. Waits if the grammar is not compiled, or forgotten."""
        inner = self.prepare(grammar).result().deep_copy()
        inner.consume_tokens(list(generated))
        return Matcher(inner, len(generated))

    def fill(self, matchers: Sequence[Matcher]) -> NDArray[np.int32]:
        """-> i32[len(matchers), mask_words]: bit t % 32 of word t // 32 says whether token t may come next.

        A matcher that fails here (`Matcher.error`) has a row that means nothing.
        """
        masks = np.zeros((len(matchers), self.mask_words), np.int32)
        row_bytes = masks.strides[0]
        if len(matchers) == 1:
            matchers[0].inner.unsafe_compute_mask_ptr(masks.ctypes.data, row_bytes)
        else:
            rows = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
            self._filler.unsafe_compute_mask_ptr(rows, masks.ctypes.data, row_bytes, len(matchers))
        return masks

    def close(self) -> None:
        """End the threads behind what they are doing."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = _compiled(self._tokenizer, grammar)
        _first_mask(matcher.deep_copy())
        return matcher


class Matcher:
    """How far one answer has come in its grammar. Engine thread only."""

    def __init__(self, inner: LLMatcher, num_tokens: int) -> None:
        self.inner = inner
        self.num_tokens = num_tokens
        """Generated tokens that it has taken."""

    def take(self, token_id: int) -> None:
        """A token was drawn. One that the grammar does not allow is an `error` from here on."""
        self.num_tokens += 1
        self.inner.consume_token(token_id)

    @property
    def error(self) -> str | None:
        """Why it cannot go on; it never can again."""
        return _reason(self.inner.get_error()) if self.inner.is_error() else None


def _compiled(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise GrammarRefused(f"it has {len(grammar.text)} characters: at most {MAX_GRAMMAR_CHARS} are possible")
    try:
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
    except (ValueError, GbnfToLarkError) as error:
        raise GrammarRefused(_reason(str(error))) from error
    except RecursionError as error:
        raise GrammarRefused("it is too deeply nested") from error
    if matcher.is_error():
        raise GrammarRefused(_reason(matcher.get_error()))
    return matcher


def _first_mask(matcher: LLMatcher) -> None:
    """Raise GrammarRefused for a grammar that no text begins to match, or whose first step passes the limits."""
    matcher.compute_bitmask()
    if matcher.is_error():
        error = matcher.get_error()
        raise GrammarRefused("no text matches it" if error.startswith("NoExtension") else _reason(error))


def _source(grammar: Grammar) -> str:
    """As llguidance reads it."""
    match grammar.kind:
        case "json":
            options = {"whitespace_flexible": False} if grammar.is_compact else {"whitespace_pattern": _WHITESPACE}
            return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides=options))  # type: ignore[arg-type]
        case "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case "choice":
            choices: list[str] = json.loads(grammar.text)
            return str(LLMatcher.grammar_from_regex("|".join(map(_literal, choices))))
        case "lark":
            return str(LLMatcher.grammar_from_lark(any_to_lark(grammar.text)))


def _literal(text: str) -> str:
    """A regular expression that matches `text` and nothing else."""
    return "".join(c if c.isalnum() or not c.isascii() else f"\\x{ord(c):02x}" for c in text)


def _reason(error: str) -> str:
    """The first line of llguidance's own words: the others draw arrows under the grammar."""
    return (error.strip().splitlines() or ["it cannot be used"])[0][:_LONGEST_REASON]


class _Bytes:
    """A tokenizer of the 256 bytes: grammars speak of bytes, so what it can check holds for every model's tokens."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [bytes([value]) for value in range(256)] + [b"</s>"]
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


_BYTES = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257)
