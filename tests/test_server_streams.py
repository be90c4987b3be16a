import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fastapi import FastAPI, Response
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.client import RequestStream
from engine.types import GenerateRequest, SamplingParams, TokenLogprobs, Update
from server import answers, errors
from server.generation import Choice, Generation, News, TextOptions
from server.stops import StopStrings
from server.streams import HOLE, LARGEST_BACKLOG, OPEN, EventStream, FrameTemplate, frame, quoted
from server.text import Text
from support.live_server import LiveServer, live_server, until
from support.running import asyncio_test
from support.scripted import scripted_client
from support.tiny_tokenizer import TinyTokenizer, write_byte_level


@settings(max_examples=50, deadline=None)
@given(text=st.text(), index=st.integers(0, 99), model=st.text())
def test_a_rendered_frame_is_the_object_with_its_holes_filled(text: str, index: int, model: str) -> None:
    template = FrameTemplate({"model": model, "choices": [{"index": HOLE, "text": HOLE}], "percent": "100%s"})
    rendered = template.render(str(index), quoted(text))
    expected = {"model": model, "choices": [{"index": index, "text": text}], "percent": "100%s"}
    assert rendered.startswith(b"data: ")
    assert rendered.endswith(b"\n\n")
    assert json.loads(rendered.removeprefix(b"data: ")) == expected
    # One line for every client, also those that split at what Unicode calls a line end.
    assert len(rendered.decode().splitlines()) == 2


class Script:
    """An engine client with one request, to which a test pushes updates one by one."""

    def __init__(self) -> None:
        self.was_cancelled = False

    def submit(self, request: GenerateRequest) -> RequestStream:
        self.stream = RequestStream(request.request_id, request.n, self.cancel)
        return self.stream

    def cancel(self, request_id: str, index: int | None) -> None:
        self.was_cancelled = True


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTokenizer:
    words = ["Sum", " 4", "ND", " Lisbon", "think", " B", " C"]
    return write_byte_level(tmp_path_factory.mktemp("tiny"), words)


def one_by_one(token_ids: Sequence[int], finish: Any = "length", **last: Any) -> list[Update]:
    updates = [Update("r", token_ids=(token_id,)) for token_id in token_ids]
    return [*updates[:-1], replace(updates[-1], finish=finish, **last)]


async def deltas(tiny: TinyTokenizer, updates: list[Update], *stops: str, n: int = 1, **sampling: Any) -> list[str]:
    """What each frame says, in order; "ERROR" where the stream failed."""
    request = GenerateRequest("r", (113,), n=n, sampling=SamplingParams(**sampling))
    options = TextOptions(StopStrings(stops))
    script = Script()
    generation = Generation(script, Text(str(tiny.folder)), [request], options, n=n)  # type: ignore[arg-type]
    generation.submit()

    said = []

    def render(choice: Choice, news: News) -> bytes:
        said.append(news.text)
        return news.text.encode()

    frames = answers.Told(generation, lambda choice: b"", render, None)
    sent = b""
    try:
        for update in updates:
            if not generation.is_over:
                script.stream.push(update)
                sent += frames.take()
        sent += frames.take()  # a failure comes behind what was there to tell
    except errors.ApiError:
        said.append("ERROR")
    assert sent.decode() == "".join(text for text in said if text != "ERROR")
    await generation.aclose()
    assert script.was_cancelled or script.stream.is_over
    return said


@asyncio_test
async def test_b01_no_delta_holds_any_part_of_the_stop(tiny: TinyTokenizer) -> None:
    ids = tiny.ids("Sum", ":", " 4", "2", "\n", "E", "ND", "x")
    assert await deltas(tiny, one_by_one(ids), "\nEND") == ["Sum", ":", " 4", "2", ""]


@asyncio_test
async def test_b03_the_held_tail_comes_with_the_end_whatever_the_end_is(tiny: TinyTokenizer) -> None:
    ids = tiny.ids("A", " B", " C")
    assert await deltas(tiny, one_by_one(ids), "C and D") == ["A", " B", " C"]
    ended = one_by_one([*ids, tiny.eos_id], "stop", stop_token_id=tiny.eos_id)
    assert await deltas(tiny, ended, "C and D") == ["A", " B", " ", "C"]
    failed = [*one_by_one(ids, None), Update("r", finish="failed", error_code="deadline_exceeded")]
    assert await deltas(tiny, failed, "C and D") == ["A", " B", " ", "C", "ERROR"]


@asyncio_test
async def test_b04_only_a_true_prefix_is_held_and_no_delta_is_empty(tiny: TinyTokenizer) -> None:
    think = tiny.ids("x", "<", "/", "think", ">", "y")
    assert await deltas(tiny, one_by_one(think), "<END>") == ["x", "</", "think", ">", "y"]
    assert await deltas(tiny, one_by_one(tiny.ids(*"abcdefghij")), "zzzzzzzzzzzz") == list("abcdefghij")


@asyncio_test
async def test_b05_a_character_is_sent_once_with_its_last_token(tiny: TinyTokenizer) -> None:
    smile = tiny.byte(0xF0, 0x9F, 0x98, 0x8A)
    assert await deltas(tiny, one_by_one([*smile, *tiny.ids("z")])) == ["😊", "z"]
    assert await deltas(tiny, one_by_one(smile[:3])) == ["\ufffd"]


@asyncio_test
async def test_choices_wait_for_the_prompts_logprobs_which_choice_0_brings(tiny: TinyTokenizer) -> None:
    a, b = tiny.ids("a", "b")
    entry = TokenLogprobs(a, -1.0)
    updates = [
        Update("r", index=1, token_ids=(b,), finish="length"),
        Update("r", index=0, token_ids=(a,), finish="length", prompt_logprobs=(None, entry)),
    ]
    assert await deltas(tiny, updates, n=2, prompt_logprobs=0) == ["a", "b"]


@asyncio_test
async def test_one_choice_that_fails_gives_out_what_the_others_held(tiny: TinyTokenizer) -> None:
    (c,) = tiny.ids("C")
    updates = [Update("r", index=0, token_ids=(c,)), Update("r", index=1, token_ids=(c,), finish="failed")]
    assert await deltas(tiny, updates, "C and D", n=2) == ["C", "C", "ERROR"]


def takes(tiny: TinyTokenizer, steps: list[list[Update]], *stops: str, is_short: bool) -> list[object]:
    """What is taken behind each step of updates, and what was counted. is_short: text may take the short way."""
    options = TextOptions(StopStrings(stops))
    script = Script()
    request = GenerateRequest("r", (113,))
    generation = Generation(script, Text(str(tiny.folder)), [request], options, n=1)  # type: ignore[arg-type]
    generation.submit()
    delta = str.encode if is_short else None
    frames = answers.Told(generation, lambda choice: b"begin ", lambda choice, news: news.text.encode(), None, delta)
    frames.when_news(lambda: None)
    taken: list[object] = []
    for updates in steps:
        for update in updates:
            script.stream.push(update)
        while content := frames.take():
            taken.append(content)
        taken.append((frames.is_over, generation.usage.completion_tokens, generation.choices[0].num_tokens))
    return taken


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_text_says_the_same_whichever_way_it_takes(data: st.DataObject, tiny: TinyTokenizer) -> None:
    pieces = [*tiny.ids("Sum", " Lisbon", "a", "C"), *tiny.byte(0xF0, 0x9F, 0x98, 0x8A, 0xFF)]
    drawn = st.lists(st.sampled_from(pieces), max_size=3).map(tuple)
    steps = data.draw(st.lists(st.lists(drawn, max_size=3), min_size=1, max_size=8))
    updates = [[Update("r", token_ids=token_ids) for token_ids in step] for step in steps]
    first, last = Update("r", cached_tokens=0), Update("r", token_ids=tuple(tiny.ids("a")), finish="length")
    updates = [[first, *updates[0]], *updates[1:], [last]]
    stops = data.draw(st.sampled_from([(), ("C and D",)]))
    assert takes(tiny, updates, *stops, is_short=True) == takes(tiny, updates, *stops, is_short=False)


class Misbehaving:
    """Frames of which each `take` is one step of a generator; None is nothing yet."""

    backlog = 0

    def __init__(self, steps: Iterator[bytes | None], *, backlog: int = 0) -> None:
        self.is_over = False
        self.backlog = backlog
        self.was_given_up = False
        self._steps = steps

    def when_news(self, call: Callable[[], None]) -> None:
        pass

    def take(self) -> bytes:
        try:
            return next(self._steps) or b""
        except StopIteration:
            self.is_over = True
            return b""

    def give_up(self) -> None:
        self.was_given_up = True


def silent() -> Iterator[bytes | None]:
    while True:
        yield None


def late_failure() -> Iterator[bytes | None]:
    yield frame({"text": "a"})
    raise errors.deadline_exceeded()


def early_failure() -> Iterator[bytes | None]:
    raise errors.deadline_exceeded()
    yield


def bug() -> Iterator[bytes | None]:
    yield frame({"text": "a"})
    raise RuntimeError("a secret")


def endless() -> Iterator[bytes | None]:
    while True:
        yield b"data: " + b"x" * 65536 + b"\n\n"


class Streams:
    """Routes of the test's own, each a stream that misbehaves in one way."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        """By route: a client may have its answer's last byte before the one before it has ended here."""
        self.given_up: Counter[str] = Counter()

    def add_to(self, app: FastAPI) -> None:
        for steps in (silent, late_failure, early_failure, bug, endless):
            app.get(f"/{steps.__name__}")(self._response(steps))
        app.get("/far_behind")(self._response(endless, backlog=LARGEST_BACKLOG + 1, stalled_s=3600.0))

    def _response(
        self, steps: Callable[[], Iterator[bytes | None]], *, backlog: int = 0, stalled_s: float = 0.3
    ) -> Any:
        async def respond() -> Response:
            frames = Misbehaving(steps(), backlog=backlog)

            async def on_end() -> None:
                self.ended[steps.__name__] += 1
                self.given_up[steps.__name__] += frames.was_given_up

            return EventStream(frames, on_end, keep_alive_s=0.02, stalled_s=stalled_s)

        return respond


@pytest.fixture(scope="module")
def streams() -> Streams:
    return Streams()


@pytest.fixture(scope="module")
def server(streams: Streams) -> Iterator[LiveServer]:
    with live_server(scripted_client(), prepare=streams.add_to) as live:
        yield live


def test_a_silent_stream_is_kept_alive_by_comments_and_ends_when_its_client_leaves(
    server: LiveServer, streams: Streams
) -> None:
    ended = streams.ended["silent"]
    with server.http.stream("GET", "/silent") as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        assert [next(lines) for _ in range(3)] == [": keep-alive"] * 3
    until(lambda: streams.ended["silent"] == ended + 1)


def test_b30_an_error_behind_the_first_byte_is_an_event_and_then_the_end(server: LiveServer) -> None:
    *_, event, done, _ = server.http.get("/late_failure").text.split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert done == "data: [DONE]"


def test_an_error_before_the_first_byte_is_a_true_status(server: LiveServer, streams: Streams) -> None:
    ended = streams.ended["early_failure"]
    answer = server.http.get("/early_failure")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert streams.ended["early_failure"] == ended + 1


def test_a_fault_of_ours_in_mid_stream_is_told_without_its_insides(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    text = server.http.get("/bug").text
    assert "internal_error" in text
    assert "secret" not in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/endless", "/far_behind"])
def test_b27_a_client_that_stops_reading_or_is_far_behind_is_left(
    server: LiveServer, streams: Streams, path: str
) -> None:
    given_up = streams.given_up["endless"]
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        until(lambda: streams.given_up["endless"] == given_up + 1)


@settings(max_examples=30, deadline=None)
@given(text=st.text(), model=st.text())
def test_a_template_with_holes_filled_for_good_renders_the_same(text: str, model: str) -> None:
    template = FrameTemplate({"model": model, "choices": [{"index": HOLE, "text": HOLE}], "percent": "100%s%%"})
    whole = template.render(quoted("7%s"), f'{{"said": {quoted(text)}}}')
    assert template.filled(quoted("7%s"), f'{{"said": {OPEN}}}').render_text(text) == whole
