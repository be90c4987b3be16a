"""The toy decoder with a tokenizer of its 32 tokens, grammars and all: a whole engine that draws real tokens.

Its letters spell JSON, and no more: `{}[]":,-`, digits, the letters of true, false and null, a, b, c, x and the space.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.client import InProcessClient
from engine.grammar import Grammars
from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from engine.types import EngineInfo
from support.scripted import scripted_info
from support.toy_decoder import CONTEXT, VOCAB, ToyDecoder
from support.toy_executor import toy_executor

LETTERS = '{}[]":,-0123456789truefalsnbcx '
EOS = len(LETTERS)
assert EOS + 1 == VOCAB

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Overlapping:
    """An executor of which the loop believes that it overlaps: what the CPU drew is there earlier than it must be."""

    overlaps = True

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(LETTERS.index, text))


def text(token_ids: Any) -> str:
    return "".join(LETTERS[token_id] for token_id in token_ids if token_id != EOS)


def write_toy_tokenizer(folder: Path) -> Path:
    vocab = {letter.replace(" ", "\u0120"): i for i, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def toy_grammars(folder: Path) -> Grammars:
    return Grammars((folder / "tokenizer.json").read_text(), VOCAB, [EOS])


def toy_engine(
    folder: Path, *, overlaps: bool = True, max_num_seqs: int = 8, max_waiting: int = 8, cells: int = 255
) -> tuple[EngineLoop, EngineInfo]:
    """folder: from `write_toy_tokenizer`."""
    grammars = toy_grammars(folder)
    executor = toy_executor(ToyDecoder(), grammars=grammars, max_sessions=max_num_seqs, capacity_cells=cells)
    info = scripted_info(
        max_model_len=CONTEXT,
        vocab_size=VOCAB,
        kv_cells=executor.total_cells,
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
        eos_token_ids=(EOS,),
        tokenizer_dir=str(folder),
        has_grammars=True,
    )
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, prefill_budget=32, mixed_budget=32, prefill_chunk=8)
    return EngineLoop(Overlapping(executor) if overlaps else executor, limits, grammars=grammars), info


def toy_client(folder: Path, *, overlaps: bool = True) -> InProcessClient:
    """Not started."""
    loop, info = toy_engine(folder, overlaps=overlaps)
    return InProcessClient(lambda progress: (loop, info))
