"""Token ids to text, one token at a time: the deltas, joined, are the text of the whole.

Nearly every decoder of today (byte-level BPE, SentencePiece with byte fallback) turns each token into bytes of its own
and joins them. For those a token's bytes are looked up once and a stateful UTF-8 decoder holds incomplete characters:
exact for every cut, and two dictionary reads a token. Any other decoder is run over a short window of tokens.

Bytes that are no UTF-8 become U+FFFD the way Python and Rust do it, one for each maximal part; a character cut by the
end of the answer becomes one.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER_BYTES = 4
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One choice's text. Not shared: it holds the characters that are not complete yet."""

    def push(self, token_id: int) -> str:
        """The text this token completes; "" when it completes none."""
        ...

    def finish(self) -> str:
        """What is left when no token follows: "" or one U+FFFD for a half character."""
        ...


class Pieces(dict[int, bytes]):
    """Token id -> the bytes it stands for, read from the tokenizer when first asked for. Unknown ids are empty."""

    def __init__(self, tokenizer: Tokenizer, to_bytes: Callable[[str], bytes]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._to_bytes = to_bytes
        self.texts = _Texts(self)

    def __missing__(self, token_id: int) -> bytes:
        try:
            token = self._tokenizer.id_to_token(token_id)
        except OverflowError:  # an id that is no 32-bit number is no token either
            token = None
        piece = self[token_id] = b"" if token is None else self._to_bytes(token)
        return piece


class _Texts(dict[int, str | None]):
    """Token id -> its piece as text, where it begins and ends with a character; None for parts of characters."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._pieces[token_id].decode("utf-8")
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


@dataclass(frozen=True)
class Joining:
    """A decoder that joins the bytes of its tokens, as read from tokenizer.json."""

    to_bytes: Callable[[str], bytes]
    stripped_spaces: int
    """Leading spaces that the decoder takes from the whole text."""


def joining_decoder(decoder: dict[str, Any] | None) -> Joining | None:
    """Recognise the `decoder` node of tokenizer.json; None when tokens do not decode independently of each other."""
    if decoder is None:
        return None
    nodes = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps: list[Callable[[str], str | bytes]] = []
    is_fused, stripped_spaces = False, 0
    for node in nodes:
        match node:
            case {"type": "ByteLevel"}:
                steps.append(_from_byte_level)
            case {"type": "ByteFallback"}:
                steps.append(_from_byte_token)
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                # Behind Fuse a longer pattern could match across tokens.
                len(old) == 1 or not is_fused
            ):
                steps.append(_replacing(old, new))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if is_fused:
                stripped_spaces = start
            case _:
                return None
    return Joining(_chain(steps), stripped_spaces)


class JoiningDetokenizer:
    """For decoders that `joining_decoder` knows."""

    def __init__(
        self, pieces: Pieces, hidden_ids: frozenset[int], stripped_spaces: int, context: Sequence[int] = ()
    ) -> None:
        """hidden_ids: tokens that make no text. context: what stands before the first token pushed."""
        self._pieces = pieces
        self._hidden_ids = hidden_ids
        self._decoder = _UTF8("replace")
        self._strip = stripped_spaces
        for token_id in context:
            if not self._strip:
                break
            self._visible(token_id)
        # A character can only be open in the last three bytes, so the tail of the context is all that matters.
        tail = b""
        for token_id in reversed(context):
            if len(tail) >= _LONGEST_CHARACTER_BYTES:
                break
            if token_id not in hidden_ids:
                tail = pieces[token_id] + tail
        self._decoder.decode(tail)
        self._texts = pieces.texts
        self._is_between = not self._decoder.getstate()[0]
        """No character is open."""

    def push(self, token_id: int) -> str:
        if self._strip:
            return self._decode(self._visible(token_id))
        if token_id in self._hidden_ids:
            return ""
        if self._is_between and (text := self._texts[token_id]) is not None:
            return text
        return self._decode(self._pieces[token_id])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _decode(self, piece: bytes) -> str:
        text = self._decoder.decode(piece)
        self._is_between = not self._decoder.getstate()[0]
        return text

    def _visible(self, token_id: int) -> bytes:
        """The token's bytes while leading spaces are still taken from the text."""
        piece = b"" if token_id in self._hidden_ids else self._pieces[token_id]
        while self._strip and piece.startswith(b" "):
            piece = piece[1:]
            self._strip -= 1
        if piece:
            self._strip = 0
        return piece


class WindowDetokenizer:
    """For any decoder: decodes the latest tokens with and without the new one, and gives the difference."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(context[-_WINDOW_TOKENS:])
        self._num_sent = len(self._window)
        """Tokens of the window whose text was given out."""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._unsent()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._window = self._window[-max(_WINDOW_TOKENS, len(self._window) - self._num_sent) :]
        self._num_sent = len(self._window)
        return text

    def finish(self) -> str:
        text = self._unsent()
        self._num_sent = len(self._window)
        return text

    def _unsent(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._num_sent])) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))


_WINDOW_TOKENS = 8
"""Tokens of context that a decoder which is not joining may look back upon."""


def _chain(steps: list[Callable[[str], str | bytes]]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        value: str | bytes = token
        for step in steps:
            if isinstance(value, bytes):
                break
            value = step(value)
        return value if isinstance(value, bytes) else value.encode("utf-8", "replace")

    return to_bytes


def _replacing(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _from_byte_token(token: str) -> str | bytes:
    """SentencePiece's byte fallback: "<0xE2>" is one byte."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is printable, else U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_level_alphabet()


def _from_byte_level(token: str) -> str | bytes:
    """A token with a character outside the alphabet (an added one) stands for itself."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
