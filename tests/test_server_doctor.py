"""What the doctor finds, and what of it stands in the way."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from pathlib import Path

import pytest
from pydantic import SecretStr

from server import cli, doctor
from server.doctor import Finding
from server.settings import Settings
from support.live_server import live_server
from support.scripted import scripted_client


def found(settings: Settings) -> dict[str, Finding]:
    return {finding.subject: finding for finding in doctor.find(settings)}


def of_model(path: Path) -> list[tuple[str, str]]:
    return [(finding.subject, finding.verdict) for finding, _ in doctor.model(str(path))]


def test_a_machine_that_can_serve_is_exit_code_0_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--port", "0", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for subject in ("python", "cellserve", "driver", "torch", "GPU", "model", "memory", "disk", "files", "port"):
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


def test_what_k_v_in_fp8_costs_without_a_gpu_is_noted() -> None:
    assert list(doctor.kv_dtype("auto", "cpu")) == []
    (finding,) = doctor.kv_dtype("fp8", "cpu")
    assert (finding.subject, finding.verdict) == ("K/V dtype", "note")


def test_batch_invariance_where_there_is_no_gpu_is_a_fault() -> None:
    assert list(doctor.invariance(False, "cpu")) == []
    (finding,) = doctor.invariance(True, "cpu")
    assert (finding.verdict, finding.text) == ("fault", "--batch-invariant needs a CUDA device: leave it out here")


def test_a_gpu_that_nothing_was_measured_on_is_noted_with_the_command() -> None:
    assert list(doctor.tilings(Settings(device="cpu"))) == []
    assert doctor.tuned(0, "a warning\ncut as measured\n", "m") == Finding("products", "ok", "cut as measured")
    text = "cut by rule: it is damaged. To measure: python -m static_graphs.tune 'my model'"
    assert doctor.tuned(1, "cut by rule: it is damaged\n", "my model") == Finding("products", "note", text)
    assert doctor.tuned(1, "", "default").text.endswith("nothing was said. To measure: python -m static_graphs.tune")


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


GIB = 1 << 30


@pytest.mark.parametrize(
    ("weights", "free", "verdict", "said"),
    [
        (16, 79, "ok", "56.0 GiB are left"),
        (70, 79, "note", "2.0 GiB are left"),
        (16, 10, "fault", "end what else uses the GPU"),
        (75, 80, "fault", "raise --gpu-memory-utilization (0.9)"),
    ],
)
def test_weights_must_leave_room_for_kv(weights: int, free: int, verdict: str, said: str) -> None:
    finding = doctor.room(weights * GIB, free * GIB, 80 * GIB, 0.9)
    assert finding.verdict == verdict
    assert said in finding.text


def test_a_port_that_another_cellserve_has_is_told_with_what_that_says() -> None:
    with live_server(scripted_client(), Settings(access_log=False)) as server:
        finding = doctor.address(Settings(port=server.port))
    assert finding.verdict == "fault"
    assert finding.text.endswith("a cellserve has it and says: ready")


def test_a_port_that_something_else_has_is_told_too() -> None:
    class Teapot(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(418)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Teapot) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        finding = doctor.address(Settings(port=listening.server_port))
        listening.shutdown()
        thread.join()
    assert "does not answer as cellserve does" in finding.text


def test_a_unix_socket_is_looked_at_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert doctor.address(Settings(uds=path)).verdict == "ok"
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert doctor.address(Settings(uds=path)).verdict == "ok"  # left behind: it will be taken over
        listening.listen()
        assert "a server listens" in doctor.address(Settings(uds=path)).text
    path.unlink()
    path.write_text("")
    assert "no socket" in doctor.address(Settings(uds=path)).text
    assert doctor.address(Settings(uds=tmp_path / "none" / "s")).verdict == "fault"


def test_the_folder_of_a_disk_tier_is_measured(tmp_path: Path) -> None:
    settings = {"kv_host_gib": 0.1, "kv_disk": str(tmp_path / "kv")}
    [fits] = doctor.tiers(Settings(**settings, kv_disk_gib=0.001))
    assert fits.verdict == "ok"
    assert not (tmp_path / "kv").exists()
    [too_small] = doctor.tiers(Settings(**settings, kv_disk_gib=1e9))
    assert too_small.verdict == "fault"
    (tmp_path / "kv").write_text("a file")
    [no_folder] = doctor.tiers(Settings(**settings, kv_disk_gib=0.001))
    assert no_folder.verdict == "fault"


@pytest.mark.parametrize(("answer", "verdict"), [(b"+PONG\r\n", "ok"), (b"-NOAUTH x\r\n", "ok"), (b"HTTP/1.1", "note")])
def test_redis_is_known_by_its_answer_and_its_password_is_not_repeated(answer: bytes, verdict: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def once() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(64)
                connection.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        url = f"redis://user:hidden-word@127.0.0.1:{listening.getsockname()[1]}"
        [finding] = doctor.tiers(Settings(kv_host_gib=0.1, kv_redis=SecretStr(url)))
        thread.join()
    assert finding.verdict == verdict
    assert "hidden-word" not in finding.text


def test_a_redis_that_is_not_there_is_noted_for_the_server_starts_without_it() -> None:
    [finding] = doctor.tiers(Settings(kv_host_gib=0.1, kv_redis=SecretStr("redis://127.0.0.1:9")))
    assert finding.verdict == "note"
    assert "does not answer" in finding.text


def test_host_memory_that_is_not_there_is_a_fault() -> None:
    assert doctor.memory(0, kv_host_gib=1e6).verdict == "fault"


def test_few_open_files_are_noted() -> None:
    assert doctor.open_files(1024).verdict == "note"
    assert doctor.open_files(1 << 16).verdict == doctor.open_files(-1).verdict == "ok"
