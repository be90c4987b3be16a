"""Text at the door: encoding prompts, rendering chats, decoding tokens. The engine knows ids alone.

Reads the folder the engine wrote: tokenizer.json, tokenizer_config.json and, where the model has one,
chat_template.jinja. Uses tokenizers and jinja2, never transformers, which would load torch.
A model may come without a tokenizer; then prompts are ids and answers have ids but no text.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
from tokenizers import Tokenizer

from server import errors
from server.chat_template import ChatTemplate
from server.detokenizer import Detokenizer, JoiningDetokenizer, Pieces, WindowDetokenizer, joining_decoder

log = logging.getLogger(__name__)

_LONGEST_ON_LOOP = 8 * 1024
"""Characters; longer text is encoded and rendered on another thread, for it takes longer than a millisecond."""

_CHARACTERS_OF_A_CALL = 64
"""What encoding a text costs beyond its length, about."""

_BYTES_PER_TOKEN = 12
"""More bytes a token than any prompt has: text beyond this times the context is refused without encoding it."""

_LONGEST_UNBOUND = 2 * 1024 * 1024
"""Characters of text that no context bounds, because it is cut or only counted. A MB takes up to 2 s of one core."""

_TOLD = ("tokenizer_class", "add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces")
"""Of the configuration; the rest may name folders of the machine it was made on."""


class TemplateMessage(Protocol):
    """One message of a conversation, before it is what templates read: `Message` of the schemas."""

    @property
    def content(self) -> Any: ...

    @property
    def model_extra(self) -> dict[str, Any] | None:
        """Fields beyond role and content."""

    def for_template(self) -> dict[str, Any]: ...


class Text:
    """Immutable once built, and safe on any thread."""

    def __init__(self, tokenizer_dir: str | None) -> None:
        """None: a model without a tokenizer. Raises OSError or ValueError when the folder is not what it should be."""
        self.bos_token: str | None = None
        self.eos_token: str | None = None
        self.chat_template: ChatTemplate | None = None
        self.description: dict[str, Any] = {}
        """Of the tokenizer, in the words of its own configuration: special tokens, what it adds, the template."""
        self.special_ids: frozenset[int] = frozenset()
        self._tokenizer: Tokenizer | None = None
        self._warned_of_bos = False
        if tokenizer_dir is not None:
            self._load(Path(tokenizer_dir))

    def _load(self, folder: Path) -> None:
        source = (folder / "tokenizer.json").read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(source)
        # A tokenizer.json may carry the settings of its training; a served prompt is neither cut nor filled.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        joining = joining_decoder(json.loads(source).get("decoder"))
        self._stripped_spaces = joining.stripped_spaces if joining else 0
        self._is_joining = joining is not None
        self._pieces = Pieces(tokenizer, joining.to_bytes if joining else str.encode)

        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
        special_tokens = _special_tokens(config)
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        template = _template_source(folder, config)
        self.description = {
            **{name: config[name] for name in _TOLD if name in config},
            **special_tokens,
            "chat_template": template,
        }
        if template is not None:
            try:
                self.chat_template = ChatTemplate(
                    template,
                    special_tokens=special_tokens,
                    added_tokens={token.content: token.special for token in added.values()},
                )
            except jinja2.TemplateSyntaxError as error:
                raise ValueError(f"the model's chat template is not jinja: {error}") from error

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def num_tokens(self) -> int:
        """Length of the vocabulary with added tokens; 0 without a tokenizer."""
        return 0 if self._tokenizer is None else int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    # Text to ids.

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """The ids of `text`. Text that already begins with the BOS token's text does not get another.

        Raises ApiError 400 without a tokenizer.
        """
        if self._tokenizer is None:
            raise errors.invalid_value("this model has no tokenizer: send the prompt as token ids", param)
        # encode() holds the interpreter's lock while it works, the batch form does not; fast: without offsets.
        token_ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self._begins_with_two_bos(text, token_ids):
            if not self._warned_of_bos:
                self._warned_of_bos = True
                log.warning("a prompt begins with %s, which the tokenizer adds: one is kept", self.bos_token)
            return token_ids[1:]
        return token_ids

    async def encode_prompt(
        self, text: str, *, max_model_len: int | None = None, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """As encode, off the event loop when long. Raises ApiError 400 when it is hopelessly over the context.

        max_model_len: None for text that need not fit; then there is only a limit of what one may cost.
        """
        self._refuse_by_size(text, max_model_len, param)
        if len(text) <= _LONGEST_ON_LOOP:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    async def encode_prompts(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_model_len: int | None = None,
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> list[Sequence[int]]:
        """As encode_prompt, of many; ids are left as they are. Many short texts together are as long as one."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self._refuse_by_size(text, max_model_len, param)

        def run() -> list[list[int]]:
            return [self.encode(text, add_special_tokens=add_special_tokens, param=param) for text in texts]

        is_short = sum(map(len, texts)) + len(texts) * _CHARACTERS_OF_A_CALL <= _LONGEST_ON_LOOP
        encoded = iter(run() if is_short else await asyncio.to_thread(run))
        return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def encode_chat(
        self,
        messages: Sequence[TemplateMessage],
        *,
        max_model_len: int | None = None,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Render and encode; control tokens spelled in the conversation are plain text. Raises ApiError 400."""
        if self.chat_template is None:
            raise errors.invalid_value(
                "this model has no chat template: use /v1/completions with the prompt's text", "messages"
            )

        def run() -> list[int]:
            assert self.chat_template is not None
            rendered = self.chat_template.render(
                [message.for_template() for message in messages],
                variables,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
            self._refuse_by_size(rendered, max_model_len, "messages")
            token_ids: list[int] = []
            for piece in self.chat_template.pieces(rendered):
                token_ids += self.encode(piece, add_special_tokens=add_special_tokens and not token_ids)
            return token_ids

        size = sum(_num_characters(message.content) for message in messages)
        if max_model_len is not None and size > _BYTES_PER_TOKEN * max_model_len:
            raise _hopeless(size, max_model_len, "messages")
        others = [variables, tools, *(message.model_extra for message in messages)]
        if size + len(messages) * 64 <= _LONGEST_ON_LOOP and _is_light(others, _LONGEST_ON_LOOP - size):
            return run()
        return await asyncio.to_thread(run)

    # Ids to text.

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens alone, an incomplete character at the end included as U+FFFD."""
        detokenizer = self.detokenizer((), skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])

    def ids_of(self, tokens: Sequence[str]) -> frozenset[int]:
        """Of those that are tokens of this model."""
        found = [] if self._tokenizer is None else [self._tokenizer.token_to_id(token) for token in tokens]
        return frozenset(token_id for token_id in found if token_id is not None)

    def detokenizer(
        self,
        context: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """For what follows `context`, which decides whether a first space is text and may end in half a character.

        shown_ids: special tokens that are not skipped, where the tokenizer's own decoder is not needed.
        """
        if self._tokenizer is None:
            return _Silent()
        if not self._is_joining:
            return WindowDetokenizer(self._tokenizer, skip_special_tokens, context)
        hidden_ids = self.special_ids - shown_ids if skip_special_tokens else frozenset()
        return JoiningDetokenizer(self._pieces, hidden_ids, self._stripped_spaces, context)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for by itself, special tokens as they are spelled."""
        if self._tokenizer is None:
            return b""
        if self._is_joining:
            return self._pieces[token_id]
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    def token_text(self, token_id: int) -> str:
        r"""As logprobs name it: its text, or `bytes:\xe2\x80` for a part of a character; `token_id:7` without text."""
        piece = self.token_bytes(token_id)
        if not piece:
            return token_id_name(token_id)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _begins_with_two_bos(self, text: str, token_ids: list[int]) -> bool:
        if not self.bos_token or not text.startswith(self.bos_token) or len(token_ids) < 2:
            return False
        assert self._tokenizer is not None
        bos_id = self._tokenizer.token_to_id(self.bos_token)
        return bool(token_ids[0] == bos_id and token_ids[1] == bos_id)

    @staticmethod
    def _refuse_by_size(text: str, max_model_len: int | None, param: str) -> None:
        if max_model_len is None:
            if len(text) > _LONGEST_UNBOUND:
                raise errors.request_too_large(
                    f"the text has {len(text)} characters: at most {_LONGEST_UNBOUND} are turned into tokens", param
                )
            return
        limit = _BYTES_PER_TOKEN * max_model_len
        # Characters first: counting bytes copies the text.
        size = len(text) if len(text) > limit or len(text) * 4 <= limit else len(text.encode())
        if size > limit:
            raise _hopeless(size, max_model_len, param)


class _Silent:
    """The detokenizer of a model without a tokenizer."""

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def token_id_name(token_id: int) -> str:
    """How logprobs name a token by its id."""
    return f"token_id:{token_id}"


def _hopeless(size_bytes: int, max_model_len: int, param: str) -> errors.ApiError:
    return errors.context_length_exceeded(
        f"the prompt has at least {size_bytes} bytes, more than a context of {max_model_len} tokens can hold",
        max_model_len=max_model_len,
        param=param,
    )


def _num_characters(content: Any) -> int:
    """Of a message's content: text, or parts of it."""
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(_num_characters(part.get("text")) for part in content if isinstance(part, dict))
    return 0


def _is_light(value: Any, limit: int) -> bool:
    """Whether all text and all values within it come to no more than `limit` characters. Looks no further than that."""
    waiting, weight = [value], 0
    while waiting and weight <= limit:
        item = waiting.pop()
        weight += len(item) if isinstance(item, str) else 8
        if isinstance(item, Mapping):
            waiting += item
            waiting += item.values()
        elif isinstance(item, Sequence) and not isinstance(item, str):
            waiting += item
    return weight <= limit


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like; each is text, or an object that holds it as `content`."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    found = {name: config.get(name) for name in names}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template's own file, else the one in the tokenizer's configuration: text, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        by_name = {entry["name"]: entry["template"] for entry in source}
        source = by_name.get("default")
    return source if isinstance(source, str) else None
