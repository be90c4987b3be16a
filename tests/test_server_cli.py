"""The command line: what each bad start says and returns, the one line of a good one, and the way to stop."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from server import cli, run
from server.options import ENV_PREFIX, flag_name
from server.settings import Settings
from support.live_server import until
from support.scripted import scripted_info
from support.scripted_server import ROOT, ServerProcess, child_environment


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and the one line that a command says on stderr."""
    code = cli.main(argv)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("cellserve: ")
    assert output.err.count("\n") == 1
    return code, output.err.removeprefix("cellserve: ").strip()


# Bad starts.


@pytest.mark.parametrize(("argv", "words"), [
    (["serve", "--max-model-length", "5"], "unknown option --max-model-length; did you mean --max-model-len?"),
    (["serve", "--prot=80"], "unknown option --prot; did you mean --port?"),
    (["serve", "--max-model", "5"], "unknown option --max-model; did you mean --max-model-len?"),
    (["serve", "tiny", "tinier"], "unknown option tinier"),
    (["serve", "--port", "high"], "--port is 'high': input should be a valid integer"),
    (["serve", "--port"], "argument --port: expected one argument (see cellserve serve --help)"),
    (["serve", "--host", "999.1.1.1"], "--host 999.1.1.1 is no address of this machine"),
    (["serve", "--config", "none.yaml"], "--config none.yaml cannot be read: No such file or directory"),
    (["show-config", "--dtype", "fp4"], "--dtype is 'fp4'"),
    (["sevre"], "invalid choice: 'sevre' (choose from"),
    ([], "the following arguments are required: COMMAND"),
])  # fmt: skip
def test_a_bad_command_line_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = complaint(capsys, *argv)
    assert code == 2
    assert words in said


def test_a_port_in_use_is_told_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = complaint(capsys, "serve", "/no/such/model", "--port", str(port))
    assert code == 2
    assert said == f"port {port} on 127.0.0.1 is in use: choose another with --port, or 0 for a free one"


@pytest.mark.parametrize(("model", "code", "said"), [
    ("refuse-model", 1, "cellserve: refuse-model: the folder holds no config.json"),
    ("refuse-config", 2, "cellserve: --kv-cells 2 is too few: give at least 512"),
])  # fmt: skip
def test_a_failed_load_is_told_without_a_traceback(model: str, code: int, said: str) -> None:
    with ServerProcess(model) as server:
        ended_with, output, complaint = server.ended()
    assert (ended_with, output) == (code, "")
    assert said in complaint.splitlines()
    assert "Traceback" not in complaint
    assert "dead" not in complaint, "the reason says it all"


def test_a_folder_that_is_no_models_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = complaint(capsys, "serve", str(tmp_path), "--port", "0")
    assert (code, said) == (1, f"{tmp_path} holds neither config.json nor a .gguf file: it is no model's folder")
    code, said = complaint(capsys, "serve", f"{tmp_path}/none", "--port", "0")
    assert (code, said) == (1, f"there is no model at {tmp_path}/none")


@pytest.mark.full
def test_a_model_that_the_real_engine_cannot_read_is_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    command = [sys.executable, "-m", "server.cli", "serve", str(tmp_path), "--port", "0", "--device", "cpu"]
    ended = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended.stderr
    assert str(tmp_path) in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


# Other commands.


def test_help_lists_every_option_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for field in Settings.model_fields:
        assert field == "model" or flag_name(field) in text
    for group in ("model:", "cache:", "scheduling:", "API:", "limits:"):
        assert f"\n{group}\n" in text


def test_show_config_names_every_value_and_its_source_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("seed: 4\n")
    monkeypatch.setenv("CELLSERVE_API_KEY", "hush")
    assert cli.main(["show-config", "tiny", "--config", str(file), "--enforce-eager"]) == 0
    output = capsys.readouterr().out
    rows = {row.split()[0]: " ".join(row.split()[1:]) for row in output.splitlines() if row.strip()}
    assert set(Settings.model_fields) <= set(rows)
    assert rows["model"] == "tiny flag engine/build.py"
    assert rows["enforce_eager"] == "yes flag engine/build.py"
    assert rows["api_key"] == "*** environment server/guards.py"
    assert rows["seed"].startswith("4 /")
    assert rows["drain_timeout"] == "30.0 s default server/run.py"
    assert "hush" not in output


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert re.fullmatch(r"cellserve \S+\n", capsys.readouterr().out)


def test_the_command_line_needs_no_torch() -> None:
    program = "import sys; from server import cli; cli.main(['version']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=child_environment(), check=True, timeout=60)


def test_nothing_slow_is_imported_before_the_engine_is_spawned() -> None:
    slow = ("fastapi", "numpy", "llguidance", "tokenizers", "prometheus_client", "httpx", "torch", "transformers")
    program = f"""
import sys
import tempfile
from engine.client import ProcessClient
from server import cli

def spawn(client):
    print(*(name for name in {slow} if name in sys.modules))
    sys.exit(0)

ProcessClient.spawn = spawn
cli.main(["serve", "--port", "0"])
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("\n", "")


def test_a_signal_to_all_while_the_server_is_imported_leaves_neither_folder_nor_socket(tmp_path: Path) -> None:
    """As a service manager sends it: the engine's process, which imports too, cannot take its folder with it."""
    program = f"""
import os, signal, sys
from engine.client import ProcessClient
from server import cli

spawn = ProcessClient.spawn

def spawn_and_be_told(client):
    spawn(client)
    os.killpg(0, signal.SIGTERM)

ProcessClient.spawn = spawn_and_be_told
sys.exit(cli.main(["serve", "--uds", {str(tmp_path / "s")!r}]))
"""
    with tempfile.TemporaryDirectory() as folder:  # short: sockets live in it
        command = [sys.executable, "-c", program]
        environment = child_environment() | {"TMPDIR": folder}
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
        )
        assert (ended.returncode, ended.stderr) == (128 + signal.SIGTERM, "")
        assert os.listdir(folder) == []
    assert not (tmp_path / "s").exists()


# A good start, and the end.


def test_a_good_start_prints_one_line_with_a_command_that_works_when_pasted() -> None:
    with ServerProcess("acme/tiny", "--api-key", "k1") as server:
        line = server.ready_line()
        assert re.search(r"ready: http://127\.0\.0\.1:\d+ serves acme/tiny with 4,096 K/V cells\. Try: curl ", line)
        assert "k1" not in line
        if shutil.which("curl"):
            command = ["sh", "-c", line.partition("Try: ")[2]]
            pasted = subprocess.run(command, env=os.environ | {"API_KEY": "k1"}, capture_output=True, timeout=20)
            assert json.loads(pasted.stdout)["usage"]["completion_tokens"] == 16, pasted
        server.signal(signal.SIGTERM)
        code, output, complaint = server.ended()
    assert (code, output) == (0, "")
    assert "reading the script (1 of 2)" in complaint
    assert "Traceback" not in complaint


@pytest.mark.parametrize(("context", "max_tokens"), [(512, 16), (20, 16), (10, 6), (4, 1)])
def test_the_command_asks_for_no_more_tokens_than_the_context_allows(context: int, max_tokens: int) -> None:
    line = run.ready_line("http://localhost", scripted_info(max_model_len=context), Settings())
    assert json.loads(line.partition(" -d ")[2].strip("'")) == {"prompt": [1, 2, 3], "max_tokens": max_tokens}


def test_a_start_on_all_addresses_names_one_to_paste() -> None:
    with run.bind("0.0.0.0", 0) as listener:
        url = run.url_of(Settings(host="0.0.0.0"), listener)
        assert url == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_unix_socket_is_served_named_in_the_command_and_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    with ServerProcess("tiny", "--uds", str(path)) as server:
        assert f"curl --unix-socket {path} http://localhost/v1/completions" in server.ready_line()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
            assert http.get("http://localhost/v1/models").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.ended()[0] == 0
    assert not path.exists()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_start_that_fails_leaves_no_unix_socket(
    workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    code, said = complaint(capsys, "serve", f"{tmp_path}/none", "--uds", str(path), "--api-workers", workers)
    assert (code, said) == (1, f"there is no model at {tmp_path}/none")
    assert not path.exists()


def test_a_unix_socket_that_answers_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        code, said = complaint(capsys, "serve", "--uds", str(path))
    assert (code, said) == (2, f"cannot listen on --uds {path}: it is in use")


def test_a_certificate_makes_it_answer_over_tls() -> None:
    certificate = ROOT / "tests/support/localhost.pem"
    with ServerProcess("tiny", "--ssl-certfile", str(certificate)) as server:
        server.ready_line()
        assert server.url.startswith("https://127.0.0.1:")
        with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate)), trust_env=False) as http:
            assert http.get(f"{server.url}/v1/models").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.ended()[0] == 0


def test_ctrl_c_while_loading_ends_cleanly() -> None:
    with ServerProcess("load-for-ever") as server:
        server.wait_for_stderr("reading the script (1 of 2)")
        server.signal(signal.SIGINT)
        code, output, complaint = server.ended()
    assert (code, output) == (0, "")
    assert "Traceback" not in complaint


def test_sigterm_lets_requests_finish_and_refuses_new_ones() -> None:
    with ServerProcess("tiny") as server:
        server.ready_line()
        server.tell("hold")
        answers = [server.complete_later(prompt=[5 + index], max_tokens=3) for index in range(64)]
        until(lambda: server.num_started() == 64)
        server.signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status_code == 503)
        refused = server.complete(prompt=[5])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["Connection"] == "close"
        server.tell("release")
        assert [answer.result().status_code for answer in answers] == [200] * 64
        assert server.ended()[0] == 0


def test_when_the_drain_is_too_short_what_is_left_is_told() -> None:
    with ServerProcess("tiny", "--drain-timeout", "0.2") as server:
        server.ready_line()
        server.tell("hold")
        answer = server.complete_later(prompt=[5], max_tokens=3)
        until(lambda: server.num_started() == 1)
        server.signal(signal.SIGTERM)
        assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (503, "draining")
        server.tell("release")
        assert server.ended()[0] == 0


def test_a_second_sigterm_ends_at_once() -> None:
    with ServerProcess("tiny", "--drain-timeout", "600") as server:
        server.ready_line()
        server.tell("hold")
        server.complete_later(prompt=[5], max_tokens=3)
        until(lambda: server.num_started() == 1)
        server.signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status_code == 503)
        server.signal(signal.SIGTERM)
        assert server.process.wait(5) == 128 + signal.SIGTERM
