"""The same engine and the same text, without HTTP.

with LLM("HuggingFaceTB/SmolLM2-135M-Instruct") as llm:
    for completion in llm.generate(["The capital of France is", "2 + 2 ="], max_tokens=8, temperature=0):
        print(completion.choices[0].text)
    first, second = llm.embed(["a cat", "a dog"])
    print(sum(a * b for a, b in zip(first.vector, second.vector)))
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from engine.client import EngineClient, InProcessClient
from engine.config import EngineConfig
from engine.errors import CellserveError
from engine.types import EngineInfo, TokenLogprobs
from server import completions, embeddings, errors, extra_fields, structured
from server.embeddings import EmbeddingBody
from server.errors import ApiError
from server.fields import RawPrompt
from server.generation import Choice
from server.schemas import CompletionBody
from server.text import Text

_Result = TypeVar("_Result")
_Body = TypeVar("_Body", bound=BaseModel)


@dataclass(frozen=True)
class ChoiceOutput:
    text: str
    token_ids: tuple[int, ...]
    """Every token drawn, with the one that ended the text."""
    finish_reason: str
    """stop or length."""
    stop_reason: str | int | None
    """The stop string or stop token that ended it; None for the end of text."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, when asked for."""


@dataclass(frozen=True)
class Completion:
    """One prompt and its n choices."""

    prompt: str | None
    """None for a prompt of ids."""
    prompt_token_ids: tuple[int, ...]
    choices: tuple[ChoiceOutput, ...]


@dataclass(frozen=True)
class Embedding:
    """One input's vector, of length 1."""

    input: str | None
    """None for one of ids."""
    input_token_ids: tuple[int, ...]
    vector: tuple[float, ...]


class LLM:
    """A loaded model. Methods may be called from any thread, also where an asyncio loop runs; they wait.

    Owns an event loop in a thread of its own, on which the engine's client lives. Leave it with `with` or `close()`.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """options: fields of EngineConfig. Raises ConfigError or ModelError when the model cannot be served."""
        self._start(InProcessClient.from_config(EngineConfig(model=model, **options)))

    @classmethod
    def from_client(cls, client: EngineClient) -> Self:
        """Around an engine of the caller's, which was not started."""
        llm = cls.__new__(cls)
        llm._start(client)
        return llm

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    def generate(
        self, prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], **fields: Any
    ) -> list[Completion]:
        """One completion a prompt, in order; as many run at once as the engine holds.

        fields: those of a /v1/completions body, with its names, ranges and defaults: max_tokens, n, temperature, top_p,
        seed, stop, logprobs ... Raises ValueError naming the field, or RuntimeError when the engine failed.
        """
        body = _checked(CompletionBody, {"prompt": _as_lists(prompts), **fields})
        for name in ("stream", "echo", "prompt_logprobs"):
            if getattr(body, name):
                raise ValueError(f"{name} is of the HTTP API: generate returns answers whole, beside their prompts")
        return self._run(self._generate(body))

    def embed(
        self, inputs: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], **fields: Any
    ) -> list[Embedding]:
        """One vector an input, in order.

        fields: those of a /v1/embeddings body: dimensions, truncate_prompt_tokens, add_special_tokens ... Raises
        ValueError naming the field, or where the model makes none, and RuntimeError when the engine failed.
        """
        body = _checked(EmbeddingBody, {"input": _as_lists(inputs), **fields})
        if body.encoding_format is not None:
            raise ValueError("encoding_format is of the HTTP API: embed returns numbers")
        return self._run(self._embed(body))

    def close(self) -> None:
        """End the engine; what runs is cut. Repeating it does nothing."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, client: EngineClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        try:
            self._text = self._run(self._load())
        except BaseException:
            self._run(client.close())
            self._stop()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _load(self) -> Text:
        await self._client.start()
        info = await self._client.wait_ready()
        return Text(info.tokenizer_dir)

    async def _generate(self, body: CompletionBody) -> list[Completion]:
        capacity = self.info.max_num_seqs + self.info.max_waiting
        places = asyncio.Semaphore(max(1, capacity // body.draws))

        async def one(raw: RawPrompt) -> Completion:
            async with places:
                return await self._complete(raw, body)

        tasks = [asyncio.ensure_future(one(raw)) for raw in body.prompt]
        try:
            with _told_as_python():
                return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _embed(self, body: EmbeddingBody) -> list[Embedding]:
        with _told_as_python():
            requests, vectors = await embeddings.embed(body, self._client, self._text)
        return [
            Embedding(raw if isinstance(raw, str) else None, request.prompt_token_ids, vector)
            for raw, request, vector in zip(body.input, requests, vectors, strict=True)
        ]

    async def _complete(self, raw: RawPrompt, body: CompletionBody) -> Completion:
        await structured.check(body.form, self._client)
        (prompt,) = await completions.encode([raw], body, self._text, self.info)
        generation = completions.generation_of(body, self._client, self._text, [prompt], uuid.uuid4().hex)
        generation.submit()
        try:
            await generation.finished()
        finally:
            await generation.aclose()
        return Completion(
            prompt.own_text, prompt.token_ids, tuple(map(_output, completions.answered(body, generation)))
        )


def _checked(kind: type[_Body], fields: dict[str, Any]) -> _Body:
    """Raises ValueError naming the field."""
    try:
        body = kind.model_validate(fields)
        unknown = extra_fields.check(body)
    except ValidationError as error:
        raise ValueError(errors.from_validation(error.errors(), fields).message) from error
    except ApiError as error:
        raise ValueError(error.message) from error
    if unknown:
        raise ValueError(f"unknown fields: {unknown['x-ignored-params']}")
    return body


@contextmanager
def _told_as_python() -> Iterator[None]:
    """Refusals as ValueError, failures of ours as RuntimeError."""
    try:
        yield
    except ApiError as error:
        kind = ValueError if error.status < 500 else RuntimeError
        raise kind(error.message) from error
    except CellserveError as error:
        raise ValueError(str(error)) from error


def _output(choice: Choice) -> ChoiceOutput:
    assert choice.finish_reason is not None
    news = choice.take()
    return ChoiceOutput(
        news.text, tuple(news.token_ids), choice.finish_reason, choice.stop_reason, tuple(news.logprobs)
    )


def _as_lists(prompts: Any) -> Any:
    """Sequences as JSON has them: what a body is checked as."""
    return prompts if isinstance(prompts, str) or not isinstance(prompts, Sequence) else [_as_lists(p) for p in prompts]
