"""Tokenizers small enough to read: every byte is a token, and words are tokens that a script can name.

Encoding makes byte tokens only, for there are no merges; decoding knows the words too. So a scripted model can emit
exactly the tokens that a test is about.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from server.detokenizer import BYTE_OF_CHARACTER

BOS, EOS, START, END, THINK = "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


@dataclass(frozen=True)
class TinyTokenizer:
    """A folder as the engine writes it, and the ids of what is in it."""

    folder: Path
    words: dict[str, int]
    specials: dict[str, int]
    first_byte_id: int
    vocab_size: int

    @property
    def eos_id(self) -> int:
        return self.specials[EOS]

    def ids(self, *texts: str) -> tuple[int, ...]:
        """One id a text: a word, a special token or a single-byte character."""
        return tuple(self._id(text) for text in texts)

    def byte(self, *values: int) -> tuple[int, ...]:
        return tuple(self.first_byte_id + value for value in values)

    def _id(self, text: str) -> int:
        for known in (self.words, self.specials):
            if text in known:
                return known[text]
        (value,) = text.encode()
        return self.first_byte_id + value


def write_byte_level(
    folder: Path, words: Sequence[str] = (), *, adds_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE
) -> TinyTokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    tokens = [_CHARACTER_OF_BYTE[byte] for byte in range(256)]
    tokens += ["".join(_CHARACTER_OF_BYTE[byte] for byte in word.encode()) for word in words]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    word_ids = {word: 256 + i for i, word in enumerate(words)}
    return _write(folder, tokenizer, word_ids, 0, adds_bos, chat_template)


def write_sentencepiece(
    folder: Path,
    words: Sequence[str] = (),
    *,
    adds_bos: bool = True,
    strips: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
) -> TinyTokenizer:
    """As Llama 2 (strips the first space) and Gemma (does not) have it; a space in `words` is written as ▁."""
    tokens = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *(word.replace(" ", "\u2581") for word in words),
    ]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    prepend = [normalizers.Prepend("\u2581")] if strips else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strips else []))
    word_ids = {word: 258 + i for i, word in enumerate(words)}
    return _write(folder, tokenizer, word_ids | {" ": 257}, 1, adds_bos, chat_template)


def _write(
    folder: Path,
    tokenizer: Tokenizer,
    words: dict[str, int],
    first_byte_id: int,
    adds_bos: bool,
    chat_template: str | None,
) -> TinyTokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (BOS, EOS, START, END)])
    tokenizer.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    specials = {text: tokenizer.token_to_id(text) for text in (BOS, EOS, START, END, THINK)}
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, specials[BOS])]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": {"content": EOS}}))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return TinyTokenizer(folder, words, specials, first_byte_id, tokenizer.get_vocab_size())
