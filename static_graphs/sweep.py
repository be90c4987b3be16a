"""Tries every causal model type of the installed transformers and writes what serves: `python -m static_graphs.sweep`.

For each type a tiny random model is built from nothing but its config class, bound, and run packed against its own
eager forward, past every window. Each type runs in a process of its own, under a time limit. The outcome is
ARCHITECTURES.md. Given model types as arguments, it prints their lines instead.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cache.geometry import Geometry
from static_graphs.load_errors import ModelLoadError, UnsupportedModel
from static_graphs.model import LoadedModel, model_from_config
from static_graphs.proof import row_errors
from static_graphs.tiny_config import tiny_config

TABLE = Path(__file__).resolve().parent.parent / "ARCHITECTURES.md"
_LIMIT_S = 60
_PIECES = ((6, 3), (1, 1), (9, 7), (1, 1), (1, 1))
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the table."""

    model_type: str
    architecture: str
    verdict: str
    """equal, refused, different or failed."""
    detail: str


def main(names: list[str]) -> int:
    """Returns 1 where a type ran and was wrong: that is a fault of ours, while a refusal is an answer."""
    outcomes = [try_apart(name) for name in names or causal_types()]
    for outcome in outcomes:
        print(f"{outcome.model_type}: {outcome.verdict}: {outcome.detail}")
    if not names:
        TABLE.write_text(table(outcomes), encoding="utf-8")
    return 1 if any(outcome.verdict == "different" for outcome in outcomes) else 0


def causal_types() -> list[str]:
    """Model types with a causal language model whose class declares support for attention back ends."""
    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _class_of(name)._supports_attention_backend)


def try_type(model_type: str) -> Outcome:
    """Build, bind and compare one type."""
    architecture = _class_of(model_type).__name__
    try:
        model = _tiny_model(model_type)
        worst = float(row_errors(model, _PIECES).max())
    except ModelLoadError as refusal:
        reason = str(refusal).partition(" cannot be served: ")[2] or str(refusal)
        return Outcome(model_type, architecture, "refused", reason)
    except Exception as error:  # an outermost edge: whatever a type does, the sweep goes on
        return Outcome(model_type, architecture, "failed", f"{type(error).__name__}: {error}")
    verdict = "equal" if worst <= _TOLERANCE else "different"
    return Outcome(model_type, architecture, verdict, _stored(model.geometry))


def _tiny_model(model_type: str) -> LoadedModel:
    config = tiny_config(model_type)
    try:
        return model_from_config(config)
    except UnsupportedModel:
        if getattr(config, "is_decoder", None) is not False:
            raise
        # BERT and its kin are causal only when told so; GPT-NeoX is, whatever this says.
        return model_from_config(tiny_config(model_type, is_decoder=True))


def try_apart(model_type: str) -> Outcome:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    # Forked, so that transformers is imported once; nothing but this thread runs here.
    process = multiprocessing.get_context("fork").Process(target=_report, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(_LIMIT_S):
            outcome: Outcome = receiver.recv()
            return outcome
        return Outcome(model_type, _class_of(model_type).__name__, "failed", f"no answer within {_LIMIT_S} s")
    except EOFError:
        return Outcome(model_type, _class_of(model_type).__name__, "failed", "its process died")
    finally:
        process.kill()
        process.join()


def _report(model_type: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    sender.send(try_type(model_type))


def _class_of(model_type: str) -> Any:
    return AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]]


def _stored(geometry: Geometry) -> str:
    kinds = sorted({(la.num_kv_heads, la.k_dim, la.v_dim, la.reach) for la in geometry.layers})
    parts = []
    for heads, k_dim, v_dim, reach in kinds:
        widths = f"{heads} x {k_dim}" if k_dim == v_dim else f"{heads} x {k_dim}/{v_dim}"
        parts.append(f"{widths} {'all' if reach.kind == 'all' else f'{reach.kind} {reach.size}'}")
    return f"{len(geometry.layers)} layers: {', '.join(parts)}"


def table(outcomes: list[Outcome]) -> str:
    count = {
        verdict: sum(o.verdict == verdict for o in outcomes) for verdict in ("equal", "refused", "different", "failed")
    }
    lines = [
        "# Architectures",
        "",
        f"Written by `python -m static_graphs.sweep` with transformers {transformers.__version__}: every causal model "
        "type that declares support for attention back ends, as a tiny random model, packed over cells against its "
        "own eager forward in float32.",
        "",
        f"{count['equal']} equal, {count['refused']} refused by name, {count['different']} different, "
        f"{count['failed']} that this script could not build. Other types are tried by the same proof when they are "
        "loaded, and refused if they fail it.",
        "",
        "| model type | class | outcome | K/V of the tiny model (heads x width, reach), or the reason |",
        "|---|---|---|---|",
    ]
    for outcome in outcomes:
        detail = " ".join(outcome.detail.split()).replace("|", "/")[:240]
        lines.append(f"| {outcome.model_type} | {outcome.architecture} | {outcome.verdict} | {detail} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
