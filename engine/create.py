"""A model and options -> an executor: cache, forwards, sampler, and the captures, in the order they need each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from cache.cell_cache import CellCache
from cache.factory import cache_factory
from cache.geometry import CacheMemoryError, Geometry, InvalidConfig, UnknownKind
from cache.step import CellStep
from engine.cell_executor import CellExecutor
from engine.errors import ConfigError, ModelError
from engine.executor_options import ExecutorOptions, derive
from engine.grammar import Grammars
from engine.invariance import prove_invariant
from engine.sampling import REHEARSED, Sampler, rehearse
from static_graphs.additional import AdditionalMethods
from static_graphs.capture import CapturedForwards
from static_graphs.forwards import Forwards, Model
from static_graphs.loading import LoadFormat
from static_graphs.model import ModelLoadError, load_model
from static_graphs.taps import Taps

Progress = Callable[[str, int, int], None]
"""(what is being done, done, of)."""


class ServedModel(Model, Protocol):
    """What an executor needs of a model; static_graphs.model.LoadedModel is the real one."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def body(self) -> torch.nn.Module: ...


def create_executor(
    model: ServedModel,
    options: ExecutorOptions,
    progress: Progress = lambda *_: None,
    grammars: Grammars | None = None,
) -> CellExecutor:
    """Raises ConfigError before anything is built, when limits or layers cannot be kept; ModelError where the model is
    to be batch-invariant and is not.

    grammars: of the model's tokens; without it, a session with a grammar is refused.
    """
    is_cuda = model.device.type == "cuda"
    if options.batch_invariant and not is_cuda:
        raise ConfigError(f"a batch-invariant executor needs a CUDA device: this model is on {model.device}")
    plan = derive(options, context=model.max_model_len, dtype=model.dtype)
    try:
        taps = Taps(model.body, options.tap_layers, plan.cache.max_write) if options.tap_layers else None
    except ValueError as error:
        raise ConfigError(str(error)) from error
    progress("allocating the K/V pool", 0, 1)
    try:
        cache = cache_factory().build(options.cache_kind, model.geometry, plan.cache, model.device)
    except (InvalidConfig, UnknownKind) as error:
        raise ConfigError(str(error)) from error
    except (CacheMemoryError, MemoryError) as error:
        raise ConfigError(
            f"a K/V pool of {options.capacity_cells} cells does not fit into this machine's memory: {error}"
        ) from error
    cache.bind_program("forward", model.geometry, plan.cache.kv_dtype)
    additional = AdditionalMethods(options.additional_methods)
    head_rows = plan.methods[0].max_tokens if options.batch_invariant else None
    forwards: Forwards
    if is_cuda and options.captures_static_methods:
        forwards = captured = CapturedForwards(
            model,
            plan.methods,
            model.device,
            min_selected_rows=options.min_selected_rows,
            taps=taps,
            head_rows=head_rows,
            has_full_step=options.captures_full_step,
        )
        draws = [partial(rehearse, params, model.vocab_size, model.device, model.dtype) for params in REHEARSED]
        captured.capture(lambda width: _rehearsal(cache, width), progress, draws)
        additional.capture()
    else:
        forwards = Forwards(
            model, plan.methods, min_selected_rows=options.min_selected_rows, taps=taps, head_rows=head_rows
        )
    if options.batch_invariant:
        progress("proving that rows do not depend on their step", 0, 1)
        prove_invariant(forwards, cache, model.device, longest=plan.max_session_tokens)
    return CellExecutor(
        forwards,
        cache,
        Sampler(model.vocab_size, model.device, plan.cache.max_sequences, grammars),
        additional,
        max_sessions=options.max_sessions,
        max_session_tokens=plan.max_session_tokens,
        device=model.device,
        overlaps=is_cuda and options.overlaps,
    )


def load_executor(
    model: str,
    options: ExecutorOptions,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    load_format: LoadFormat = "auto",
    max_model_len: int | None = None,
    seed: int = 0,
) -> CellExecutor:
    """As `create_executor`, from a folder, a GGUF or a hub id. Raises ModelError when it cannot be loaded."""
    try:
        loaded = load_model(
            model, device=device, dtype=dtype, load_format=load_format, max_model_len=max_model_len, seed=seed
        )
    except ModelLoadError as error:
        raise ModelError(str(error)) from error
    return create_executor(loaded, options)


@contextmanager
def _rehearsal(cache: CellCache, width: int) -> Iterator[CellStep]:
    """A step of one token and padding at the addresses that serving uses; it leaves no trace."""
    sequence = cache.seq_new()
    try:
        cache.declare_step([sequence])
        try:
            yield cache.prepare_step(width)
        finally:
            cache.undo_step()
    finally:
        cache.seq_rm(sequence)
