"""The page in a real browser, against a real server and an engine that draws real tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from engine.client import InProcessClient
from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from server.settings import Settings
from support.browser import Page, browser, needs_chromium
from support.live_server import LiveServer, live_server, until
from support.scripted import GATE_TIMEOUT_S, scripted_info
from support.toy_decoder import CONTEXT, VOCAB, ToyDecoder
from support.toy_executor import toy_executor
from support.toy_server import EOS, toy_client, toy_grammars, write_toy_tokenizer

pytestmark = needs_chromium

KEY = "a-key-of-mine"
PROMPT = "abc abc abc abc abc abc"


class Gated:
    """The toy's executor, whose steps wait at a gate."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.gate = threading.Event()
        self.gate.set()

    def collect(self, in_flight: Any) -> Any:
        assert self.gate.wait(GATE_TIMEOUT_S), "a step was never let through"
        return self._executor.collect(in_flight)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Gated:
    folder = write_toy_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Gated(toy_executor(ToyDecoder(), grammars=toy_grammars(folder)))


@pytest.fixture(scope="module")
def server(executor: Gated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_toy_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    info = scripted_info(
        max_model_len=CONTEXT,
        vocab_size=VOCAB,
        kv_cells=executor.total_cells,
        eos_token_ids=(EOS,),
        tokenizer_dir=str(folder),
        has_grammars=True,
    )
    limits = SchedulerLimits(max_num_seqs=8, prefill_budget=32, mixed_budget=32, prefill_chunk=8)
    loop = EngineLoop(executor, limits, grammars=toy_grammars(folder))
    client = InProcessClient(lambda progress: (loop, info))
    settings = Settings(access_log=False, api_key=(SecretStr(KEY),), served_model_name=("toy",))
    with live_server(client, settings) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture
def opened(page: Page, server: LiveServer) -> Iterator[Page]:
    """The page with its key, ready. At the end the browser must have had nothing to complain about."""
    page.open(server.url)
    page.run("sessionStorage.setItem('cellserve-key', arguments[0])", KEY)
    page.open(server.url)
    page.wait("return document.getElementById('state').textContent === 'ready'")
    page.log()
    yield page
    assert page.log() == []
    page.open("about:blank")  # a stopping server would wait for its viewer


def complete(page: Page, prompt: str, max_tokens: int, *, tab: str = "tab-completion") -> None:
    page.click(tab)
    page.run("document.getElementById('p-max_tokens').value = arguments[0]", str(max_tokens))
    page.type("prompt", prompt)
    page.click("send")


def count(page: Page, selector: str) -> int:
    return int(page.run("return document.querySelectorAll(arguments[0]).length", selector))


def test_the_page_asks_for_a_key_and_goes_on_when_it_has_one(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    page.run("sessionStorage.clear()")
    page.open(server.url)
    page.wait("return document.getElementById('state').textContent === 'give an API key'")
    page.type("key", KEY + "\n")
    page.wait("return document.getElementById('state').textContent === 'ready'")
    assert page.run("return document.getElementById('model').textContent") == "toy"
    assert page.run("return localStorage.length") == 0


def test_a_completion_grows_token_by_token_with_their_probabilities(opened: Page) -> None:
    complete(opened, PROMPT, 12)
    opened.wait("return document.getElementById('figures').textContent.includes('length')")
    assert count(opened, ".token") == 12
    chances = opened.run("return [...document.querySelectorAll('.token')].map(t => t.style.getPropertyValue('--p'))")
    assert all(0 < float(chance) <= 1 for chance in chances)
    assert opened.run("return document.querySelector('.turn .text').textContent").startswith(PROMPT)
    opened.point(".token:nth-of-type(3)")
    opened.wait("return !document.getElementById('hint').hidden")
    assert 5 <= count(opened, "#hint tr") <= 6
    assert count(opened, "#hint tr.is-drawn") == 1


def test_a_chat_streams_and_a_form_given_as_json_is_obeyed(opened: Page) -> None:
    opened.type("extra", '{"structured_outputs": {"choice": ["true", "null"]}}')
    complete(opened, "a", 9, tab="tab-chat")
    opened.wait("return document.getElementById('figures').textContent.includes('stop')")
    answer = opened.run("return [...document.querySelectorAll('.turn .text')].at(-1).textContent")
    assert answer in ("true", "null")
    opened.run("document.getElementById('extra').value = ''")


CALLED = (
    {"delta": {"role": "assistant", "content": ""}},
    {"delta": {"tool_calls": [{"index": 0, "id": "call-7", "function": {"name": "weather", "arguments": ""}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"<b>Bern</b>"}'}}]}},
    {"delta": {}, "finish_reason": "tool_calls"},
)
"""What a server streams of a call; the toy's alphabet cannot spell one."""


def test_a_call_is_shown_and_its_result_goes_back_to_the_model(opened: Page) -> None:
    chunks = [{"choices": [{"index": 0, "finish_reason": None, **choice}]} for choice in CALLED]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    answer = """
      const real = window.fetch, told = arguments[0];
      window.asked = [];
      window.fetch = (path, options) => {
        if (!path.includes("chat")) return real(path, options);
        window.asked.push(JSON.parse(options.body));
        return Promise.resolve(new Response(told));
      };
    """
    opened.run(answer, stream)
    opened.type("prompt", "what weather?")
    opened.click("send")
    opened.wait("return document.getElementById('prompt').placeholder === 'The result of weather'")
    assert opened.run("return document.querySelector('.call').textContent") == 'weather {"city": "<b>Bern</b>"}'
    opened.type("prompt", "rain")
    opened.click("send")
    opened.wait("return window.asked.length === 2 && document.getElementById('stop').hidden")
    sent = opened.run("return window.asked[1].messages")
    call = {"name": "weather", "arguments": '{"city": "<b>Bern</b>"}'}
    assert sent == [
        {"role": "user", "content": "what weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call-7", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call-7", "content": "rain"},
    ]


def test_what_is_no_json_is_said_and_not_sent(opened: Page, server: LiveServer) -> None:
    before = server.metric("cellserve:choices_started_total")
    opened.type("extra", "{tools")
    opened.type("prompt", "a")
    opened.click("send")
    assert "no JSON" in opened.wait("return document.getElementById('said').textContent")
    assert server.metric("cellserve:choices_started_total") == before
    opened.run("document.getElementById('extra').value = ''")


def test_a_refusal_is_told_in_the_servers_words_and_the_prompt_comes_back(page: Page, opened: Page) -> None:
    complete(opened, "abc", 100_000)
    assert str(CONTEXT) in opened.wait("return document.getElementById('said').textContent")
    assert opened.run("return document.getElementById('prompt').value") == "abc"
    [complaint] = page.log()
    assert "400" in complaint


def test_markup_stays_text(page: Page, opened: Page) -> None:
    complete(opened, "<img src=x onerror='document.title=1'><script>document.title=2</script>", 3)
    opened.wait("return document.getElementById('said').textContent || document.querySelector('.token')")
    assert count(opened, "#thread img, #thread script, #said img, #hint img") == 0
    assert opened.run("return document.title") == "cellserve"
    page.log()  # the toy's tokenizer cannot spell it, which the server says


def test_stop_ends_the_request_in_the_engine(opened: Page, server: LiveServer, executor: Gated) -> None:
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    executor.gate.clear()
    complete(opened, "abc", 50)
    opened.wait("return !document.getElementById('stop').hidden")
    opened.click("stop")
    opened.wait("return document.getElementById('stop').hidden")
    executor.gate.set()
    until(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == before + 1)


def test_the_live_view_draws_cells_steps_and_sequences(opened: Page, server: LiveServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "n": 2, "temperature": 1}
    server.http.post("/v1/completions", json=body).raise_for_status()
    opened.wait("return document.getElementById('map-note').textContent === '255'")
    opened.wait("return document.querySelectorAll('.steps canvas').length > 3")
    # What the ended request left is the tree's: the first cell is painted unlike the last one, which is free.
    differs = """
      const map = document.getElementById("map"), paint = map.getContext("2d");
      const at = (x, y) => [...paint.getImageData(x, y, 1, 1).data].join();
      return at(3, 3) !== at(3, map.height - 3);
    """
    opened.wait(differs)
    opened.log()  # that reading a canvas back is slow
    assert "forward_" in opened.run("return document.querySelector('.steps .method').textContent")


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1100, 800), (420, 900)])
def test_nothing_is_wider_than_the_window(opened: Page, width: int, height: int) -> None:
    opened.resize(width, height)
    opened.wait("return document.documentElement.scrollWidth <= window.innerWidth")


def test_dark_and_light_are_remembered(opened: Page, server: LiveServer) -> None:
    before = opened.run("return document.documentElement.dataset.theme")
    opened.click("theme")
    after = opened.run("return document.documentElement.dataset.theme")
    assert {before, after} == {"dark", "light"}
    opened.open(server.url)
    assert opened.wait("return document.documentElement.dataset.theme") == after


def test_the_page_follows_the_server_through_its_end(opened: Page, page: Page, tmp_path: Path) -> None:
    folder = write_toy_tokenizer(tmp_path)
    with live_server(toy_client(folder), Settings(access_log=False)) as other:
        page.open(other.url)
        page.wait("return document.getElementById('state').textContent === 'ready'")
        other.run(other.app.state.lifecycle.drain(0))
        page.wait("return document.getElementById('state').textContent === 'draining'")
    page.wait("return document.getElementById('state').textContent === 'no answer'")
    page.log()
