"""`cellserve chat`: a conversation with a running server on the terminal. Any OpenAI-style server will do.

Ctrl-C stops an answer, and between answers leaves; /clear begins anew; the end of the input leaves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from rich.console import Console

EXIT_FAILED = 1

_TIMEOUT = httpx.Timeout(10, read=None)


class ChatError(Exception):
    """What the server or the connection said instead of an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="say this, print the answer and leave")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--model", help="the served name (default: the server's first)")
    parser.add_argument("--api-key", help="sent as a bearer token (default: the first of CELLSERVE_API_KEY)")
    parser.add_argument("--system", help="what the model is told before the conversation")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int, help="of one answer")
    parser.add_argument("--seed", type=int)


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True)
    key = args.api_key or os.environ.get("CELLSERVE_API_KEY", "").partition(",")[0]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=args.url, headers=headers, timeout=_TIMEOUT) as http:
        chat = Conversation(http, {name: getattr(args, name) for name in _FIELDS}, args.system)
        if args.prompt is not None:
            return EXIT_FAILED if _answer(chat, args.prompt, console) is None else 0
        console.print(f"chatting with {args.url}; /clear begins anew, Ctrl-D leaves", style="dim", highlight=False)
        failures = 0
        for line in _lines(console):
            if line == "/clear":
                chat.clear()
            elif line:
                failures += _answer(chat, line, console) is None
        return EXIT_FAILED if failures else 0


_FIELDS = ("model", "temperature", "max_tokens", "seed")


class Conversation:
    """The messages so far. An answer that failed, or was stopped before it said anything, leaves no trace in them."""

    def __init__(self, http: httpx.Client, fields: dict[str, Any], system: str | None = None) -> None:
        """fields: of the request's body, beside its messages; None is left out."""
        self._http = http
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._opening)

    def clear(self) -> None:
        self.messages = list(self._opening)

    def say(self, text: str, write: Callable[[str], None]) -> str:
        """Send `text`, hand each piece of the answer to `write`, and return all of it. Raises ChatError.

        KeyboardInterrupt ends the answer, in the server as well; what came until then is the answer.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        said = ""
        try:
            for piece in self._pieces(messages):
                said += piece
                write(piece)
        except KeyboardInterrupt:
            if not said:
                return said
        self.messages = [*messages, {"role": "assistant", "content": said}]
        return said

    def _pieces(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {**self._fields, "messages": messages, "stream": True}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise ChatError(_message(answer))
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: ") and (piece := _piece(json.loads(line.removeprefix("data: ")))):
                        yield piece
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ChatError(f"no answer from {self._http.base_url}: {error or type(error).__name__}") from error
        raise ChatError("the answer broke off")


def _piece(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise ChatError(chunk["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered {answer.status_code}"


def _answer(chat: Conversation, text: str, console: Console) -> str | None:
    """None: it failed, which was said."""

    def write(piece: str) -> None:
        print(piece, end="", flush=True)

    try:
        said = chat.say(text, write)
    except ChatError as error:
        console.print(f"chat: {error}", style="red", markup=False, soft_wrap=True)
        return None
    print(flush=True)
    return said


def _lines(console: Console) -> Iterator[str]:
    """What is typed, or piped in, up to its end."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
            return
