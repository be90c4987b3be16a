"""Families that are told once a request: as many observations as requests that ran."""

from __future__ import annotations

from server.settings import Settings
from support.live_server import live_server, until
from support.scripted import ScriptedExecutor, scripted_client


def test_each_prompt_that_ran_waited_once_and_was_computed_once() -> None:
    """MET-1, MET-3."""
    executor = ScriptedExecutor()
    with live_server(scripted_client(executor, max_num_seqs=2), Settings(access_log=False)) as server:
        for body in (
            {"prompt": [5, 6], "max_tokens": 3},
            {"prompt": [[5, 6], [7, 8]], "max_tokens": 3},  # two prompts
            {"prompt": [5, 6], "max_tokens": 3, "n": 2},  # one
            {"prompt": [5, 6], "max_tokens": 3, "stream": True},
        ):
            server.http.post("/v1/completions", json=body).raise_for_status()
        late = server.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 3, "timeout": 1e-9})
        assert late.status_code == 504
        until(lambda: server.metric("vllm:num_requests_running") == 0)
        for name in ("queue", "prefill"):
            assert server.metric(f"vllm:request_{name}_time_seconds_count") == 5


def test_cells_of_all_kinds_add_up() -> None:
    with live_server(scripted_client(ScriptedExecutor(cells=256)), Settings(access_log=False)) as server:
        server.http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 5}).raise_for_status()
        kinds = {name: server.metric(f"cellserve:cells_{name}") for name in ("used", "cached", "free", "shared")}
        assert kinds == {"used": 0, "cached": 7, "free": 249, "shared": 0}
        assert server.metric("cellserve:cells") == 256
