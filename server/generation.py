"""One HTTP request inside the engine: its prompts' streams, its choices' text, its entry in the books.

Completions, chats and `LLM` all run through here; they differ in what they ask and how they write the answer down.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from engine.client import EngineClient, RequestStream
from engine.errors import CellserveError
from engine.types import FinishReason, GenerateRequest, TokenLogprobs, Update
from server import errors
from server.admission import Reservation
from server.metrics import Metrics
from server.stops import StopFilter, StopStrings
from server.text import Text


@dataclass(frozen=True)
class TextOptions:
    """How the ids of a request become text."""

    stops: StopStrings
    min_tokens: int = 0
    """Stop strings are looked for behind this many tokens."""
    skip_special_tokens: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end a choice without being a reason of the caller's; empty when they are ignored."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are text of this request."""


@dataclass
class Usage:
    """Tokens of the whole request so far; a prompt counts once, whatever its number of choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Choice:
    """One answer to one prompt, as it grows. What was added since the last `take` is in `news`.

    Each token drawn has its entry in ids, logprobs and offsets, also one that makes no text or stands in a stop string:
    the last entry is always the token that ended the choice.
    """

    def __init__(
        self, index: int, request: GenerateRequest, text: Text, options: TextOptions, prompt_chars: int
    ) -> None:
        """index: among all choices of the HTTP request. prompt_chars: code points before the first offset."""
        self.index = index
        self.num_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.news = News()
        self._options = options
        self._has_text = text.has_tokenizer
        self._special_ids = text.special_ids
        self._detokenizer = text.detokenizer(
            request.prompt_token_ids, skip_special_tokens=options.skip_special_tokens, shown_ids=options.shown_ids
        )
        self._stops = StopFilter(options.stops) if options.stops.texts else None
        self._num_chars = prompt_chars

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_worth_telling(self) -> bool:
        """Text or the end. Tokens that make no text yet wait for those that do, unless none ever will."""
        return bool(self.news.text) or self.is_finished or (not self._has_text and bool(self.news.token_ids))

    @property
    def is_plain(self) -> bool:
        """Its text is that of its tokens, whatever came before them."""
        return self._has_text and self._stops is None

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What these tokens add to the text of one that is plain."""
        self.num_tokens += len(token_ids)
        push = self._detokenizer.push
        return push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))

    def interrupt(self) -> None:
        """Nothing more will come; what was held back is news. A finished choice stays as it is."""
        if self.finish_reason is None:
            self._end("cancelled")

    def take(self) -> News:
        news, self.news = self.news, News()
        return news

    def push(self, update: Update) -> None:
        """Take an update; what follows a stop string's match in it is dropped."""
        if update.finish == "stop":
            *before, last = update.token_ids
            self._draw(before, update.logprobs)
            if self.finish_reason is None:
                self._draw_stop_token(last, update.logprobs[-1] if update.logprobs else None)
        else:
            self._draw(update.token_ids, update.logprobs)
            if update.finish is not None and self.finish_reason is None:
                self._end(update.finish)

    def _draw(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        if logprobs is None and self._stops is None:
            self.news.token_ids += token_ids
            self.news.text += self.text_of(token_ids)
            return
        for i, token_id in enumerate(token_ids):
            self._count(token_id, logprobs[i] if logprobs else None)
            text = self._detokenizer.push(token_id)
            self._num_chars += len(text)
            if self._stops is None or self.num_tokens <= self._options.min_tokens:
                self.news.text += text
                continue
            self.news.text += self._stops.push(text)
            if self._stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.matched
                return

    def _draw_stop_token(self, token_id: int, logprob: TokenLogprobs | None) -> None:
        self._count(token_id, logprob)
        is_end_of_text = token_id in self._options.eos_token_ids
        is_control = is_end_of_text or token_id in self._special_ids
        is_shown = self._options.stops.include_in_output or (is_control and not self._options.skip_special_tokens)
        self._end("stop", self._detokenizer.push(token_id) if is_shown else "")
        self.stop_reason = None if is_end_of_text else token_id

    def _count(self, token_id: int, logprob: TokenLogprobs | None) -> None:
        self.num_tokens += 1
        self.news.token_ids.append(token_id)
        if logprob is not None:
            self.news.logprobs.append(logprob)
            self.news.offsets.append(self._num_chars)

    def _end(self, reason: FinishReason, text: str = "") -> None:
        """No token follows: give out the half character, `text` and what was held back for a stop string."""
        text += self._detokenizer.finish()
        self._num_chars += len(text)
        if self._stops is not None:
            text = self._stops.finish() + text
        self.news.text += text
        self.finish_reason = reason


class News:
    """What a choice has to tell since the last time."""

    __slots__ = ("logprobs", "offsets", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.offsets: list[int] = []


@dataclass(frozen=True)
class Times:
    """Of one HTTP request, by time.monotonic()."""

    arrived_s: float
    queued_s: float | None
    """From there until the first of its prompts ran; None: none did."""
    first_s: float | None
    """When the first token of any choice came; None: none did."""
    last_s: float
    """When the last token came, or it arrived."""


class Generation:
    """Owns the streams of one HTTP request from submission to the end, however that comes.

    Event-loop thread. `aclose` cancels what still runs, closes the books and gives the reservation back; it must be
    called once `submit` was, and may be called twice.
    """

    def __init__(
        self,
        client: EngineClient,
        text: Text,
        requests: Sequence[GenerateRequest],
        options: TextOptions,
        *,
        n: int,
        prompt_chars: Sequence[int] = (),
    ) -> None:
        """requests: one a prompt. n: choices of each; where a request asks for one, they are all that one's copies.

        prompt_chars: code points of each prompt, where logprobs are wanted.
        """
        self.requests = tuple(requests)
        self.usage = Usage(sum(len(request.prompt_token_ids) for request in requests))
        self._client = client
        self._metrics: Metrics | None = None
        self._reservation: Reservation | None = None
        self._streams: list[RequestStream] = []
        self._choices: list[list[Choice]] = []
        for number, request in enumerate(requests):
            chars = prompt_chars[number] if prompt_chars else 0
            first = sum(map(len, self._choices))
            assert request.n in (1, n)
            self._choices.append([Choice(first + j, request, text, options, chars) for j in range(n)])
        self._num_open = len(self.choices)
        self._fresh: set[int] = set()
        """Streams that may have news, by number of their prompt."""
        self._ready: deque[tuple[int, Update]] = deque()
        """Taken and not told yet, with the number of the prompt."""
        self._before_prompt: dict[int, list[Update]] = {}
        """Updates that came before the prompt's own log probabilities, by number of the prompt."""
        self._on_news: Callable[[], None] = _ignore
        self._is_due = False
        """`_on_news` is about to be called."""
        self._only: RequestStream | None = None
        """The stream of a request with one prompt and one choice in the engine, as nearly every request is."""
        self._plain: Choice | None = None
        """Its choice, where that is plain and the only one."""
        self._books: list[_Books] = []
        self._on_close = ExitStack()
        self._was_cancelled = False
        self._is_committed = False
        self._is_closed = False

    @property
    def choices(self) -> list[Choice]:
        """All of them, in order of index: prompt x n + j."""
        return [choice for choices in self._choices for choice in choices]

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Of its choices; one that has not ended counts as cancelled."""
        return [choice.finish_reason or "cancelled" for choice in self.choices]

    def submit(
        self,
        metrics: Metrics | None = None,
        reservation: Reservation | None = None,
        arrived_s: float | None = None,
        client: str = "",
    ) -> None:
        """Hand every prompt to the engine, or none. Raises the engine's RequestRefused; then nothing is owned.

        From here on the generation owns the reservation. arrived_s: time.monotonic() that latencies count from. client:
        whose turns in the queue they take.
        """
        try:
            for request in self.requests:
                self._streams.append(self._client.submit(replace(request, client=client)))
        except CellserveError:
            for stream in self._streams:
                stream.cancel()
            self._streams.clear()
            raise
        if len(self.requests) == 1 and self.requests[0].n == 1 and self.requests[0].sampling.prompt_logprobs is None:
            self._only = self._streams[0]
            only, *copies = self._choices[0]
            self._plain = only if only.is_plain and not copies else None
        for number, stream in enumerate(self._streams):
            stream.when_news(partial(self._arrived, number))
        self._metrics, self._reservation = metrics, reservation
        if reservation is not None:
            reservation.spend(self.usage.prompt_tokens)
        arrived_s = time.monotonic() if arrived_s is None else arrived_s
        self._books = [_Books(metrics, arrived_s) for _ in self.choices]
        if metrics is not None:
            for request in self.requests:
                n = len(self.choices) // len(self.requests)
                metrics.request_started(
                    prompt_tokens=len(request.prompt_token_ids), n=n, max_tokens=request.max_new_tokens
                )

    @property
    def is_over(self) -> bool:
        """Every choice has finished, and was told."""
        return not self._num_open

    @property
    def backlog(self) -> int:
        """Tokens that have come and were not told."""
        return sum(stream.num_unread for stream in self._streams)

    def when_news(self, call: Callable[[], None]) -> None:
        """Call this whenever there may be an update to tell. It must not raise, and belongs to one reader at a time."""
        self._on_news = call
        if self._only is not None:
            # One update a step: there is nothing to gather.
            self._only.when_news(call)

    def take_text(self) -> str:
        """What tokens that have come add to the text, where that is all to tell; else "": ask `told_update`."""
        if self._plain is None or self._only is None:
            return ""
        token_ids = self._only.take_tokens()
        if not token_ids:
            return ""
        self.usage.completion_tokens += len(token_ids)
        self._books[0].drawn(len(token_ids))
        return self._plain.text_of(token_ids)

    def told_update(self) -> Sequence[Choice] | None:
        """The choices that the next update tells something; None when there is no update.

        Raises ApiError when one fails, which ends them all; what each had to say until then is left in its `news`.
        """
        if self._only is not None:
            only = self._only.take()
            return None if only is None else self._tell(0, only)
        if self._ready:
            return self._tell(*self._ready.popleft())
        if not self._fresh:
            return None
        number = self._fresh.pop()
        stream = self._streams[number]
        update = stream.take()
        if update is None:
            return ()
        if stream.has_unread:
            self._fresh.add(number)
        if self.requests[number].sampling.prompt_logprobs is not None:
            self._ready.extend((number, ready) for ready in self._behind_prompt(number, update))
            return ()
        return self._tell(number, update)

    async def finished(self) -> None:
        """Take all that comes until every choice has finished; no task is woken for a token.

        Raises what `told_update` does.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def advance() -> None:
            if done.done():
                return
            try:
                while self.told_update() is not None:
                    pass
                if self.is_over or self._is_closed:
                    done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self.when_news(advance)
        advance()
        await done

    def commit(self) -> None:
        """Something leaves for the client now: what is left of the request can only go on where it is."""
        if not self._is_committed:
            self._is_committed = True
            for stream in self._streams:
                stream.commit()

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call this once, when all is over."""
        self._on_close.callback(call)

    def cancel(self) -> None:
        """End it from outside: whoever waits for it gets ApiError 409."""
        self._was_cancelled = True
        for stream in self._streams:
            stream.cancel()

    def give_up(self) -> None:
        """Whoever asked takes nothing of it any more. The caller closes it."""
        if self._metrics is not None:
            self._metrics.slow_reader_left()

    def times(self) -> Times:
        """What is known of them; once it was submitted."""
        firsts = [books.first_s for books in self._books if books.first_s is not None]
        waits = [stream.queued_s for stream in self._streams if stream.queued_s is not None]
        return Times(
            arrived_s=self._books[0].arrived_s,
            queued_s=min(waits, default=None),
            first_s=min(firsts, default=None),
            last_s=max(books.last_s for books in self._books),
        )

    def timing(self) -> str:
        """The times so far as a Server-Timing header: until the first token of any choice, from there on, in all."""
        times, now = self.times(), time.monotonic()
        first_s = now if times.first_s is None else times.first_s
        parts = {"first": first_s - times.arrived_s, "decode": now - first_s, "total": now - times.arrived_s}
        return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in parts.items())

    async def aclose(self) -> None:
        self._is_closed = True
        for stream in self._streams:
            await stream.aclose()
        for choice, books in zip(self.choices, self._books, strict=False):
            books.close(choice.finish_reason or "cancelled", choice.num_tokens)
        if self._reservation is not None:
            self._reservation.spend(self.usage.completion_tokens)
            self._reservation.release()
        self._on_close.close()

    def _arrived(self, number: int) -> None:
        """Tell the reader once for all that a step brings."""
        self._fresh.add(number)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._tell_reader)

    def _tell_reader(self) -> None:
        self._is_due = False
        self._on_news()

    def _behind_prompt(self, number: int, update: Update) -> list[Update]:
        """What may be told now: nothing before choice 0 has brought what every choice of the prompt begins with."""
        choices = self._choices[number]
        if update.prompt_logprobs is not None:
            for choice in choices:
                choice.prompt_logprobs = update.prompt_logprobs
            return [update, *self._before_prompt.pop(number, ())]
        if choices[0].prompt_logprobs is None and update.finish not in ("failed", "cancelled"):
            self._before_prompt.setdefault(number, []).append(update)
            return []
        return [update]

    def _tell(self, number: int, update: Update) -> list[Choice]:
        """Pass the update on to its choice, or to all copies; to none when it ended before, by a stop string."""
        choices = self._choices[number]
        if self.requests[number].n > 1:
            choices = choices[update.index : update.index + 1]
        if choices[0].is_finished:
            return []
        if update.cached_tokens is not None and update.index == 0:
            if self._reservation is not None:
                self._reservation.computed(len(self.requests[number].prompt_token_ids))
            self.usage.cached_tokens += update.cached_tokens
            if self._metrics is not None:
                self._metrics.prompt_looked_up(
                    prompt_tokens=len(self.requests[number].prompt_token_ids), cached_tokens=update.cached_tokens
                )
                queued_s = self._streams[number].queued_s
                if queued_s is not None:
                    since_s = time.monotonic() - self._books[choices[0].index].arrived_s
                    self._metrics.prompt_ran(queued_s=queued_s, prefill_s=max(0.0, since_s - queued_s))
        for choice in choices:
            tokens_before = choice.num_tokens
            choice.push(update)
            new_tokens = choice.num_tokens - tokens_before
            self.usage.completion_tokens += new_tokens
            books = self._books[choice.index]
            books.drawn(new_tokens)
            if choice.finish_reason is not None:
                books.close(choice.finish_reason, choice.num_tokens)
        ending = choices[0].finish_reason
        if ending is None:
            return choices
        if ending in ("failed", "cancelled"):
            for other in self.choices:
                other.interrupt()
            if self._was_cancelled and update.finish == "cancelled":
                raise errors.request_cancelled()
            raise errors.from_failure(update.error_code)
        # Stop strings are unknown to the engine, which would go on. Its siblings do.
        self._streams[number].cancel(update.index)
        self._num_open -= len(choices)
        return choices


def _ignore() -> None:
    pass


class _Books:
    """One choice's times and counts on their way into the metrics."""

    def __init__(self, metrics: Metrics | None, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.first_s: float | None = None
        """When its first token came."""
        self._metrics = metrics
        self.last_s = arrived_s
        self._is_closed = False

    def drawn(self, tokens: int) -> None:
        if not tokens:
            return
        now, metrics = time.monotonic(), self._metrics
        if self.first_s is None:
            self.first_s = now
            if metrics is not None:
                metrics.first_token(now - self.arrived_s)
                if tokens > 1:
                    metrics.token_gap(0.0, tokens - 1)
        elif metrics is not None:
            metrics.token_gap(now - self.last_s, tokens)
        self.last_s = now

    def close(self, reason: FinishReason, generated_tokens: int) -> None:
        if self._metrics is None or self._is_closed:
            return
        self._is_closed = True
        decode_s = None if self.first_s is None else self.last_s - self.first_s
        self._metrics.finished(
            reason, generated_tokens=generated_tokens, e2e_s=time.monotonic() - self.arrived_s, decode_s=decode_s
        )
