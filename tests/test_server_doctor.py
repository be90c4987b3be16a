"""What the doctor finds, and what of it stands in the way."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from server import cli, doctor
from server.doctor import Finding
from server.settings import Settings


def found(settings: Settings) -> dict[str, Finding]:
    return {finding.subject: finding for finding in doctor.find(settings)}


def of_model(path: Path) -> list[tuple[str, str]]:
    return [(finding.subject, finding.verdict) for finding, _ in doctor.model(str(path))]


def test_a_machine_that_can_serve_is_exit_code_0_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--port", "0", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for subject in ("python", "driver", "torch", "GPU", "model", "memory", "disk", "port"):
        assert subject in said


def test_a_port_in_use_is_a_fault_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["doctor", "--port", str(taken.getsockname()[1])]) == 1
    assert "is in use" in capsys.readouterr().out


def test_a_gpu_that_is_asked_for_and_not_there_is_a_fault() -> None:
    torch = pytest.importorskip("torch")
    verdict = found(Settings(device="cuda", port=0))
    if torch.cuda.is_available():
        assert "GPU" not in verdict
    else:
        assert verdict["GPU"].verdict == "fault"


def test_a_model_folder_is_looked_through(tmp_path: Path) -> None:
    assert of_model(tmp_path / "none") == [("model", "fault")]
    assert of_model(tmp_path) == [("model", "fault")]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert of_model(tmp_path) == [("model", "note"), ("tokenizer", "note")]
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert of_model(tmp_path) == [("model", "ok"), ("tokenizer", "ok")]
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (finding, _), *_ = doctor.model(str(tmp_path))
    assert finding.verdict == "fault"
    assert "b.safetensors" in finding.text


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 7}'])
def test_a_broken_description_is_told_not_raised(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert of_model(tmp_path)[0] == ("model", "fault")


def test_weights_beyond_the_memory_are_noted() -> None:
    assert doctor.memory(1 << 60).verdict == "note"
    assert "less than the weights" in doctor.memory(1 << 60).text


def test_a_hub_id_is_no_path() -> None:
    assert [finding.verdict for finding, _ in doctor.model("acme/tiny")] in (["ok"], ["note"])
