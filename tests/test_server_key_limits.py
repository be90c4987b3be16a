"""What one key may ask for, and that another key does not feel it."""

from __future__ import annotations

import threading

import httpx
import pytest

from server.errors import ApiError
from server.key_limits import Account, Accounts, KeyLimits
from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import ScriptedExecutor, scripted_client

PATH = "/v1/completions"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def wait_told(account: Account) -> int:
    """Enters must be refused; whole seconds of Retry-After."""
    with pytest.raises(ApiError) as refused:
        account.enter()
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    return int(refused.value.headers["Retry-After"])


def test_requests_a_minute_come_back_evenly() -> None:
    clock = Clock()
    account = Account(KeyLimits(requests_per_minute=2), clock)
    for _ in range(2):
        account.enter()
    assert wait_told(account) == 30
    clock.now_s = 30.0
    account.enter()
    assert wait_told(account) == 30
    clock.now_s = 3000.0
    for _ in range(2):
        account.enter()
    assert wait_told(account) == 30


def test_tokens_a_minute_are_charged_when_they_are_known_and_a_debt_is_waited_off() -> None:
    clock = Clock()
    account = Account(KeyLimits(tokens_per_minute=60), clock)
    account.enter()
    account.spend(50)
    account.enter()
    account.spend(40)
    assert wait_told(account) == 31
    clock.now_s = 31.0
    account.enter()


def test_requests_at_once_count_until_they_leave() -> None:
    account = Account(KeyLimits(concurrent=1))
    account.enter()
    assert wait_told(account) == 1
    account.leave()
    account.enter()


def test_a_refusal_counts_nothing() -> None:
    account = Account(KeyLimits(requests_per_minute=2, concurrent=1))
    account.enter()
    for _ in range(5):
        wait_told(account)
    account.leave()
    account.enter()


def test_each_key_has_an_account_of_its_own_and_none_without_limits() -> None:
    accounts = Accounts(KeyLimits(concurrent=1))
    assert accounts.of("a") is accounts.of("a")
    assert accounts.of("a") is not accounts.of("b")
    assert accounts.of(None) is None
    assert Accounts(KeyLimits()).of("a") is None


def post(server: LiveServer, key: str, **body: object) -> httpx.Response:
    return server.http.post(PATH, json={"prompt": [5], **body}, headers={"Authorization": f"Bearer {key}"})


def test_a_key_over_its_tokens_is_a_429_with_retry_after_and_others_go_on() -> None:
    settings = Settings(access_log=False, api_key="a,b", key_tokens_per_minute=100)
    with live_server(scripted_client(), settings) as server:
        assert post(server, "a", max_tokens=200).status_code == 200
        refused = post(server, "a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        # 201 tokens of 100 are spent: 102 must flow back.
        assert 55 <= int(refused.headers["Retry-After"]) <= 62
        assert post(server, "b").status_code == 200
        assert server.call(lambda: server.app.state.serving.admission.in_use) == 0
        server.http.headers["Authorization"] = "Bearer b"
        assert server.metric("vllm:admission_rejections_total", reason="rate_limit_exceeded") == 1


def test_a_key_with_enough_requests_inside_waits_for_one_to_end() -> None:
    executor = ScriptedExecutor()
    executor.hold()
    settings = Settings(access_log=False, api_key="a", key_concurrent=1)
    with live_server(scripted_client(executor), settings) as server:
        first = threading.Thread(target=lambda: post(server, "a"))
        first.start()
        until(lambda: server.call(lambda: server.app.state.serving.admission.in_use) == 1)
        assert post(server, "a").status_code == 429
        executor.release()
        first.join()
        assert post(server, "a").status_code == 200


def test_keys_take_turns_in_the_queue() -> None:
    """One place: behind what runs, the first key's third request waits for the other key's first."""
    executor = ScriptedExecutor(max_sessions=1)
    settings = Settings(api_key=("one", "two"), access_log=False)  # type: ignore[arg-type]
    with live_server(scripted_client(executor, max_num_seqs=1), settings) as server:
        executor.hold()
        client = server.app.state.serving.client

        def ask(prompt: int, key: str) -> None:
            body = {"prompt": [prompt], "max_tokens": 1}
            httpx.post(server.url + PATH, json=body, headers={"X-Api-Key": key}, timeout=20, trust_env=False)

        threads: list[threading.Thread] = []
        for prompt, key in ((10, "one"), (20, "one"), (30, "one"), (40, "two")):
            threads.append(threading.Thread(target=ask, args=(prompt, key)))
            threads[-1].start()
            until(lambda: server.call(lambda: client.num_outstanding) == len(threads))
        executor.release()
        for thread in threads:
            thread.join(20)
    assert [batch.chunks[0].tokens for batch in executor.batches] == [(10,), (20,), (40,), (30,)]
