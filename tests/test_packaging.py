"""What a person runs first works without a container engine: Make's and Docker's files name only things that exist."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.options import ENV_PREFIX, flag_name
from server.settings import Settings, load

ROOT = Path(__file__).parent.parent
INSTALL = ROOT / "scripts" / "install.sh"


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=60)


def test_shell_scripts_parse_and_are_executable() -> None:
    for script in (INSTALL, ROOT / ".ci" / "run"):
        assert os.access(script, os.X_OK), f"{script} is not executable"
        checked = run("bash", "-n", script)
        assert checked.returncode == 0, checked.stderr


def test_install_refuses_an_unknown_step_by_name() -> None:
    refused = run(INSTALL, "everything")
    assert refused.returncode == 2
    assert "no step 'everything'" in refused.stderr


def test_make_knows_what_the_readme_and_ci_ask_of_it() -> None:
    planned = run("make", "--dry-run", "install", "serve", "test", "test-full", "lint", "bench", "audit")
    assert planned.returncode == 0, planned.stderr


def test_make_serve_passes_on_only_what_it_was_given() -> None:
    bare = run("make", "--dry-run", "serve", HOST="login-host", PORT="1").stdout
    assert "--host" not in bare
    assert "--port" not in bare
    full = run("make", "--dry-run", "serve", "MODEL=/m", "PORT=9", "HOST=0.0.0.0", "ARGS=--seed 1").stdout
    assert "cellserve serve /m --host 0.0.0.0 --port 9 --seed 1" in full


def run_one_skipping_test(tmp_path: Path, reason: str, ci: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "allowed_skips.txt").write_text("test_one.py::* | needs a moon*\n")
    (tmp_path / "test_one.py").write_text(f"import pytest\n\ndef test_one():\n    pytest.skip({reason!r})\n")
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".")
    return run(*command, cwd=tmp_path, CI=ci, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def test_a_listed_skip_passes_in_ci(tmp_path: Path) -> None:
    assert run_one_skipping_test(tmp_path, "needs a moon, in phase", ci="true").returncode == 0


def test_an_unlisted_skip_fails_ci_and_is_named(tmp_path: Path) -> None:
    failed = run_one_skipping_test(tmp_path, "felt like it", ci="true")
    assert failed.returncode == 1
    assert "test_one.py::test_one | felt like it" in failed.stdout


def test_an_unlisted_skip_passes_outside_ci(tmp_path: Path) -> None:
    assert run_one_skipping_test(tmp_path, "felt like it", ci="").returncode == 0


# --- Docker: what compose and the image name, without an engine to run them -------------------------------------------


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, its arguments), continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def arguments_of(instruction: str) -> list[str]:
    return [rest for word, rest in dockerfile() if word == instruction]


def compose(name: str, **env: str) -> dict[str, Any]:
    """The file as compose reads it: ${NAME:-default} filled in, here without any .env."""

    def fill(match: re.Match[str]) -> str:
        return env.get(match[1]) or match[2]

    content = yaml.safe_load(re.sub(r"\$\{(\w+):-([^}]*)\}", fill, (ROOT / name).read_text()))
    assert "$" not in json.dumps(content), f"{name} uses a variable without a default"
    return content


def service(name: str, **env: str) -> dict[str, Any]:
    return compose(name, **env)["services"]["cellserve"]


def test_every_file_the_image_copies_exists_and_is_sent_to_the_builder() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [source for rest in arguments_of("COPY") for source in rest.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists(), source
    assert sorted(sources) == sorted(allowed)


def test_the_image_holds_every_package() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    sources = {source for rest in arguments_of("COPY") for source in rest.split()[:-1]}
    assert {package.partition(".")[0] for package in packages} <= sources


def test_the_image_runs_only_steps_that_install_knows() -> None:
    known = re.findall(r"^step_(\w+)\(\)", INSTALL.read_text(), re.MULTILINE)
    runs = [rest.partition("scripts/install.sh ")[2].split() for rest in arguments_of("RUN") if "install.sh" in rest]
    assert runs
    assert {step for steps in runs for step in steps} <= set(known)


def test_the_image_does_not_run_as_root() -> None:
    words = [word for word, _ in dockerfile()]
    assert arguments_of("USER") == ["cellserve"]
    assert words.index("USER") < words.index("ENTRYPOINT")


def test_the_command_uses_flags_that_exist() -> None:
    [entrypoint], [command] = arguments_of("ENTRYPOINT"), arguments_of("CMD")
    assert json.loads(entrypoint) == ["cellserve"]
    subcommand, *arguments = json.loads(command)
    assert subcommand == "serve"
    flags = {flag_name(field) for field in Settings.model_fields}
    assert {argument for argument in arguments if argument.startswith("--")} <= flags
    assert arguments_of("EXPOSE") == [arguments[arguments.index("--port") + 1]]


def test_the_commands_that_make_and_the_image_start_are_there() -> None:
    shown = run(sys.executable, "-m", "server.cli", "serve", "--help")
    assert shown.returncode == 0, shown.stderr
    assert {"--host", "--port"} <= set(re.findall(r"--[\w-]+", shown.stdout))
    assert run(sys.executable, "-m", "engine.bench", "--help").returncode == 0


def test_compose_sets_only_options_that_exist() -> None:
    fields = {ENV_PREFIX + field.upper() for field in Settings.model_fields}
    environment = service("compose.yaml")["environment"]
    assert {name for name in environment if name.startswith(ENV_PREFIX)} <= fields
    assert all(environment[name] in ("", None) for name in environment), "a default here would hide the server's own"


def test_compose_without_env_listens_on_this_machine_alone() -> None:
    assert service("compose.yaml")["ports"] == ["127.0.0.1:8000:8000"]
    assert service("compose.yaml", BIND="0.0.0.0", PORT="9000")["ports"] == ["0.0.0.0:9000:8000"]


def test_compose_gives_the_server_longer_to_stop_than_it_drains() -> None:
    grace_s = float(service("compose.yaml")["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings.model_fields["drain_timeout"].default + 5


def test_what_a_running_server_writes_is_a_volume_or_memory() -> None:
    content = compose("compose.yaml")
    run_as = content["services"]["cellserve"]
    assert run_as["read_only"] is True
    assert run_as["init"] is True
    writable = {mount.split(":")[1] for mount in run_as["volumes"] if not mount.endswith(":ro")} | set(run_as["tmpfs"])
    caches = re.findall(r"\w+=(/cache/\S+)", " ".join(arguments_of("ENV")))
    assert len(caches) == 3
    for folder in (*caches, "/tmp/socket"):
        assert any(folder.startswith(f"{mount}/") for mount in writable), folder
    mounts = [mount for each in content["services"].values() for mount in each.get("volumes", ())]
    named = {mount.split(":")[0] for mount in mounts if not mount.startswith((".", "/"))}
    assert named == set(content["volumes"])


def test_the_redis_profile_is_a_cache_that_only_the_server_reaches(tmp_path: Path) -> None:
    """Off unless asked for; no port, no disk, bounded, and under the address that the file's head names."""
    redis = compose("compose.yaml")["services"]["redis"]
    assert redis["profiles"] == ["redis"]
    assert "ports" not in redis
    assert redis["read_only"] is True
    words = shlex.split(redis["command"])
    assert words[0] == "redis-server"
    flags = dict(zip(words[1::2], words[2::2], strict=True))
    assert flags == {"--save": "", "--appendonly": "no", "--maxmemory": "4gb", "--maxmemory-policy": "allkeys-lru"}
    address = "redis://redis:6379"
    assert address in (ROOT / "compose.yaml").read_text()
    environment = service("compose.yaml", KV_REDIS=address, KV_HOST_GIB="8")["environment"]
    given = {name: value for name, value in environment.items() if name.startswith(f"{ENV_PREFIX}KV_")}
    flagged = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in given.items()}
    config = load({"kv_cells": "64", **flagged}, None).settings.to_engine_config()
    assert (config.kv_redis, config.kv_host_gib) == (address, 8.0)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server: apt-get install redis-server")
def test_the_redis_profiles_command_is_one_that_redis_takes(tmp_path: Path) -> None:
    words = shlex.split(compose("compose.yaml")["services"]["redis"]["command"])
    socket = tmp_path / "redis.sock"
    own = ["--port", "0", "--unixsocket", str(socket), "--dir", str(tmp_path)]
    with subprocess.Popen([*words, *own], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = next((line for line in server.stdout if "ready to accept connections" in line.lower()), None)
        server.kill()
    assert said


def test_the_gpu_file_builds_with_cuda_and_reserves_a_gpu() -> None:
    gpu = service("compose.gpu.yaml")
    assert gpu["image"] != service("compose.yaml")["image"]
    known = {rest.partition("=")[0] for rest in arguments_of("ARG")}
    assert set(gpu["build"]["args"]) <= known
    [version] = re.findall(r"^TORCH_VERSION=(\S+)$", INSTALL.read_text(), re.MULTILINE)
    assert gpu["build"]["args"]["TORCH"] == f"torch=={version}"
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@contextmanager
def probe_server(status: int, paths: list[str]) -> Iterator[int]:
    """Answers every GET with `status`; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def run_health_check(port: int) -> subprocess.CompletedProcess[str]:
    [health] = arguments_of("HEALTHCHECK")
    python, flag, script = json.loads(health.partition("CMD ")[2])
    assert (python, flag) == ("python", "-c")
    return run(sys.executable, "-c", script.replace("8000", str(port)))


@pytest.mark.parametrize(("status", "exit_code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_whether_the_server_is_ready(status: int, exit_code: int) -> None:
    paths: list[str] = []
    with probe_server(status, paths) as port:
        probed = run_health_check(port)
    assert probed.returncode == exit_code, probed.stderr
    assert paths == ["/ready"]


def test_the_health_check_fails_where_nothing_listens() -> None:
    assert run_health_check(port=9).returncode == 1
