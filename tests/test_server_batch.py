"""A file of requests, answered by a server or by a model loaded for it: one answer a line, whatever its fate."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineClient, InProcessClient
from engine.errors import ConfigError, ModelError
from server import batch
from server.settings import Settings
from support.live_server import live_server
from support.scripted import ScriptedExecutor, scripted_client

COMPLETIONS = "/v1/completions"


def entry(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def answered(
    folder: Path, *lines: Any, url: str | None = None, client: EngineClient | None = None, streams: int = 8
) -> tuple[int, dict[str | None, dict[str, Any]]]:
    """Exit code, and the answers by custom_id."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    args = argparse.Namespace(input=source, output=target, url=url, streams=streams, overwrite=False)
    code = batch.run(args, Settings(), client)
    records = [json.loads(line) for line in target.read_text().splitlines()]
    return code, {record["custom_id"]: record for record in records}


def test_every_line_is_answered_by_its_custom_id_without_a_socket(tmp_path: Path) -> None:
    executor = ScriptedExecutor()
    lines = [entry(str(i), prompt=[i, i + 1], max_tokens=3, return_token_ids=True) for i in range(40)]
    code, records = answered(tmp_path, *lines, client=scripted_client(executor))
    assert code == 0
    for i in range(40):
        response = records[str(i)]["response"]
        assert response["status_code"] == 200
        assert response["request_id"].startswith("req-")
        assert response["body"]["choices"][0]["token_ids"] == [i + 2, i + 3, i + 4]
    assert executor.opened == executor.closed


def test_a_running_server_answers_the_same(tmp_path: Path) -> None:
    with live_server(scripted_client()) as server:
        code, records = answered(tmp_path, entry("a", prompt=[5], max_tokens=2), url=server.url)
    assert code == 0
    assert records["a"]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert records["a"]["error"] is None


def test_inputs_are_embedded_too(tmp_path: Path) -> None:
    lines = [entry(str(i), "/v1/embeddings", input=[[5, i], [i]]) for i in range(9)]
    code, records = answered(tmp_path, *lines, client=scripted_client())
    assert code == 0
    assert all(len(record["response"]["body"]["data"]) == 2 for record in records.values())


def test_a_full_server_is_asked_again_until_it_has_room(tmp_path: Path) -> None:
    client = scripted_client(max_num_seqs=1, max_waiting=0)
    code, records = answered(tmp_path, *(entry(str(i), prompt=[5]) for i in range(3)), client=client, streams=2)
    assert (code, len(records)) == (0, 3)


def test_a_line_that_cannot_be_answered_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    code, records = answered(
        tmp_path,
        "{",
        "",
        entry("bad", prompt=[]),
        entry("elsewhere", url="/v1/responses"),
        entry("stream", prompt=[5], stream=True),
        {"custom_id": "bodiless", "url": COMPLETIONS},
        entry("good", prompt=[5]),
        client=scripted_client(),
    )
    assert code == 1
    assert len(records) == 6
    assert records["bad"]["response"]["status_code"] == 400
    assert records["bad"]["response"]["body"]["error"]["param"] == "prompt"
    assert records["good"]["response"]["status_code"] == 200
    for name in (None, "elsewhere", "stream", "bodiless"):
        assert records[name]["error"]["code"] == "invalid_line"
        assert records[name]["response"] is None


def test_a_custom_id_stands_for_one_line() -> None:
    first, second = batch.read_lines(json.dumps(entry("a", prompt=[5])) for _ in range(2))
    assert first.fault is None
    assert second.fault is not None


def test_a_server_that_is_not_there_is_told_line_by_line(tmp_path: Path) -> None:
    code, records = answered(tmp_path, entry("a", prompt=[5]), url="http://127.0.0.1:9")
    assert (code, records["a"]["error"]["code"]) == (1, "no_answer")


def test_files_that_cannot_be_used_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    answered(tmp_path, client=scripted_client())
    with pytest.raises(ConfigError, match="--overwrite"):
        answered(tmp_path, client=scripted_client())
    args = argparse.Namespace(input=tmp_path / "none", output=tmp_path / "o", url=None, streams=1, overwrite=False)
    with pytest.raises(ConfigError, match="No such file"):
        batch.run(args, Settings(), scripted_client())


def test_a_model_that_cannot_be_loaded_ends_the_batch(tmp_path: Path) -> None:
    def build(progress: Any) -> Any:
        raise ModelError("no config.json")

    with pytest.raises(ModelError, match=r"no config\.json"):
        answered(tmp_path, entry("a", prompt=[5]), client=InProcessClient(build))
