"""Values that cross the engine's boundaries. Immutable, torch-free, text-free, and encodable as msgpack.

Everything here is ids, positions and numbers. The server turns text into these and back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "failed"]
Pooling = Literal["last", "mean"]
"""Which hidden states, behind the final norm, make a prompt's embedding: its last token's, or the mean of all."""
ErrorCode = Literal[
    "step_failed",
    "deadline_exceeded",
    "queue_timeout",
    "shutting_down",
    "engine_unavailable",
    "grammar_refused",
    "not_finite",
]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole answer must match. Data: engine/grammar.py knows what it means."""

    kind: Literal["json", "regex", "choice", "lark"]
    text: str
    """A JSON schema, a regular expression, a JSON list of texts, or a grammar as Lark or GBNF writes it."""
    is_compact: bool = False
    """json: no whitespace between the parts."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one choice's tokens are drawn. Order of steps: spec api 4.3.

    bias -> penalties -> masks (min_tokens, allowed ids, bad words, grammar) -> temperature -> top_k -> top_p -> min_p.
    """

    temperature: float = 1.0
    """0 is greedy: the largest logit after bias, penalties and masks, ties to the lowest id."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit). -100 or less never draws the token."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never completed."""
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    """Choice j of a request draws from seed + j. None: fresh randomness for each request."""
    logprobs: int | None = None
    """None: none. k: the drawn token's log probability and the k largest alternatives, raw (before temperature)."""
    prompt_logprobs: int | None = None
    """As logprobs, for every prompt token but the first."""
    stop_token_ids: tuple[int, ...] = ()
    """Drawing one ends the choice with finish "stop"; the end-of-text ids are among them unless they are ignored."""
    min_tokens: int = 0
    """No stop token is drawn before this many tokens."""
    grammar: Grammar | None = None
    """Beats every ban: one that leaves nothing of what the grammar allows is broken rather than the grammar."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and its n choices."""

    request_id: str
    """Unique for the life of the engine; the server mints it, never the caller."""
    prompt_token_ids: tuple[int, ...]
    n: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 16
    """0: no token is drawn; the prompt is still run when prompt_logprobs asks for it."""
    priority: int = 0
    """Lower runs sooner; in equal ones clients take turns, and each one's requests run in order of arrival."""
    deadline_s: float | None = None
    """Seconds from submission after which the request fails wherever it is."""
    queue_timeout_s: float | None = None
    """Seconds from submission after which the request fails unless it has begun to run."""
    cache_salt: str | None = None
    logged_as: str | None = None
    """Its caller's name of it, the X-Request-Id: for lines of the log, and need not be unique."""
    client: str = ""
    """Whose it is: clients of one priority take turns in the queue."""
    pooling: Pooling | None = None
    """Nothing is drawn: the answer is the prompt's embedding. Goes with n = 1 and max_new_tokens = 0."""


# What there is one of for each token is a Struct: a dataclass takes three times as long to make and to read.


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Raw log-softmax values (float32) of one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), largest first; from the same tensor and rounding as `logprob`."""


class Update(msgspec.Struct, array_like=True, gc=False):
    """News of one choice. The last one of a choice carries `finish`, and exactly one does."""

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry a token id when the request asked for logprobs."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Once, with choice 0's first update: one entry a prompt token, None for the first."""
    cached_tokens: int | None = None
    """Once, with a choice's first update: prompt tokens whose K/V was already there."""
    queued_s: float | None = None
    """Once, with choice 0's first update: how long the request waited before it first ran. None: it never did."""
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, when finish is "stop". It is among `token_ids`."""
    error: str | None = None
    """What happened, when finish is "failed"."""
    error_code: ErrorCode | None = None
    embedding: bytes | None = None
    """With finish "length" of a request with `pooling`: float32, little-endian, of length 1."""


class Chunk(NamedTuple):
    """One session's tokens in one step."""

    session_id: int
    """The executor's id (`Executor.open_session`)."""
    tokens: tuple[int, ...]
    """-1 stands for the session's last drawn token where only the device knows it yet."""
    position: int
    """Of the first token."""
    wanted_rows: Literal["none", "last", "all"] = "none"
    """Which rows' logits are asked for. "all" also fills `ChunkOutput.prompt_logprobs`."""
    draws: int = 1
    """Tokens drawn from the last row, when wanted_rows is not "none": one for each choice; 0 draws nothing."""
    is_decode: bool = False
    following_token: int = -1
    """The prompt's next token behind the chunk, for wanted_rows "all"; -1 where the prompt ends here."""
    pooling: Pooling | None = None
    """Of the chunk's hidden states, which are handed out: last: the last row's; mean: the sum of all its rows'."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: decodes first, then prefill chunks in take order (SCH-8)."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class ChunkOutput(NamedTuple):
    """What one chunk of a collected step brought."""

    session_id: int
    token_ids: tuple[int, ...] = ()
    """One for each draw, in order of choice."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each draw."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """With wanted_rows "all": for row r of the chunk, the value of the token that follows it in the prompt.
    The chunk's last row has an entry only when the prompt goes on behind the chunk."""
    pooled: bytes | None = None
    """float32 [hidden], for a chunk with `pooling`."""
    error: str | None = None
    """This session alone failed; the rest of the batch stands."""
    error_code: ErrorCode = "step_failed"
    """grammar_refused: nothing that its grammar allows can follow, or the grammar has passed its limits.
    not_finite: the model's scores for it are no numbers."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One entry a chunk of the batch, in order."""

    chunks: tuple[ChunkOutput, ...]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The model's own sampling values (generation_config.json); None where it names none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the server must know of a started engine; constant for its life."""

    model: str
    """As it was asked for: a folder or a hub id."""
    architecture: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    """Ids a client may send or bias: the tokenizer's length, or the model's rows without a tokenizer."""
    kv_cells: int
    max_num_seqs: int
    max_waiting: int
    widths: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    tokenizer_dir: str | None
    """Holds tokenizer.json, tokenizer_config.json and, where the model has one, chat_template.jinja."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    has_grammars: bool = False
    """Whether answers can be held to a grammar: the tokens' bytes are known."""
    is_single: bool = False
    """Whether the cache holds one sequence, so that there is nothing to clone for a second choice."""
    pooling: Pooling | None = None
    """How prompts become embeddings here; None: they cannot, for the reason in `no_embeddings`."""
    no_embeddings: str = "this engine makes none"
    embedding_size: int = 0
    """Numbers of an embedding."""
    matryoshka: tuple[int, ...] | None = None
    """Sizes that an embedding may be cut to; (): any; None: the model was not trained for it."""
    created_s: int = 0
    """Unix time of the load, whole seconds."""
    kv_dtype: str = "auto"
    """What K/V is stored as: fp8, or a dtype's name."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot sent with each step's updates; counters only grow."""

    running: int = 0
    waiting: int = 0
    cells_used: int = 0
    """Held by running sessions."""
    cells_cached: int = 0
    """Held for prompts to come, and free as soon as running sessions need them."""
    cells_shared: int = 0
    """Of those in use, the ones that several have a claim on: running sessions, and copies on their way to a tier."""
    cells_total: int = 0
    steps: int = 0
    steps_failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    padding_rows: int = 0
    method_calls: tuple[tuple[str, int], ...] = ()
    """(forward_N or forward_others, calls), narrowest first."""
    step_time_s: float = 0.0
    """Sum over all steps."""
    rows_failed: int = 0
    """Choices that failed in a step whose others stood."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """One place below the pool where chunks of K/V are kept. Sums only grow; seconds add up calls side by side."""

    name: str
    """host, disk or redis."""
    capacity_bytes: int | None
    """None: somebody else decides."""
    used_bytes: int | None
    entries: int | None
    """Stored objects: one for each object group of a chunk."""
    held: int = 0
    """Entries that something under way keeps from eviction."""
    breaker: Literal["closed", "open", "half-open"] = "closed"
    hits: int = 0
    """Objects that were wanted and came from here."""
    misses: int = 0
    """Objects that were wanted and were not here."""
    errors: int = 0
    """Calls that failed or were too slow, and objects that did not verify."""
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    chunk_s: float | None = None
    """What a chunk lately took to come up to host memory, its objects one after another; None: not known."""
    counts: tuple[tuple[str, int], ...] = ()
    """What happened, by name: reasons of misses, drops and evictions among them."""


@dataclass(frozen=True, slots=True)
class ObjectGroupReport:
    """Layers whose K/V of a chunk is one stored object."""

    layers: tuple[int, ...]
    window_chunks: int | None
    """A prefix needs only that many chunks before its end; None needs them all."""
    object_bytes: int


@dataclass(frozen=True, slots=True)
class TiersReport:
    """What is below the pool, and what is on its way."""

    namespace: str
    """Digest of `record`, hex: what shares it shares K/V."""
    record: str
    """All that decides the K/V's bytes beside the tokens, as JSON."""
    chunk_tokens: int
    chunk_bytes: int
    object_groups: tuple[ObjectGroupReport, ...]
    staging_bytes: int
    """Device memory of both directions' rings."""
    staging_slots: int
    """Objects that can be on their way, in each direction."""
    loads_in_flight: int
    stores_in_flight: int
    fetches: int
    """Waiting sessions whose prefix is on its way up."""
    write_backs: int
    """Objects that wait to be copied to the tiers below host memory."""
    lookup_tokens: int
    """Whole chunks of queued sessions that the prefix tree lacked, in tokens."""
    loaded_tokens: int
    """Of them, those that came from a tier into the pool."""
    wait_s: float
    """Time that sessions spent between being queued and the end of their fetch, hidden behind others' steps or not."""
    worth_chunk_s: float | None
    """A tier that takes longer for a chunk is not asked; None: nobody knows yet what computing one takes."""
    tiers: tuple[TierReport, ...]


@dataclass(frozen=True, slots=True)
class KvReport:
    """Where K/V is and what becomes of it: a snapshot, made when somebody asks."""

    has_prefix_cache: bool
    cells_total: int
    cells_free: int
    cells_evictable: int
    """Of the tree, and free as soon as running sessions need them."""
    tree_cells: int
    tree_nodes: int
    tree_leases: int
    """Claims of running sessions and of copies under way."""
    tiers: TiersReport | None = None
    """None: there are none below the pool."""


@dataclass(frozen=True, slots=True)
class PrefixReset:
    """What became of the prefix tree when it was told to forget."""

    freed_cells: int
    kept_cells: int
    """Of prefixes that running sessions, or copies under way, still use."""
