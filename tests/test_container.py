"""The image and the services as they would run: every rule that can be checked without an engine.

With --full the image's steps are replayed in a fresh virtual environment, from their first line to an answer.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server.options import ENV_PREFIX
from server.settings import Settings

ROOT = Path(__file__).parents[1]
FILES = ("compose.yaml", "compose.gpu.yaml")
SERVICE_KEYS = {
    *(
        "image",
        "build",
        "ports",
        "environment",
        "volumes",
        "read_only",
        "tmpfs",
        "shm_size",
        "init",
        "cap_drop",
        "deploy",
    ),
    *(
        "security_opt",
        "stop_grace_period",
        "restart",
        "profiles",
        "command",
        "configs",
        "depends_on",
        "healthcheck",
        "user",
    ),
    *("mem_limit", "pids_limit", "networks", "secrets", "expose"),
}
"""Of the compose specification, those that weaken nothing."""
NOT_READ_ONLY = {"prometheus"}
"""Writes its own files beside its volume; holds no key but one of ours, and no prompt."""


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines)]


def composed(name: str, **env: str) -> dict[str, Any]:
    def fill(match: re.Match[str]) -> str:
        return env.get(match[1]) or match[2]

    content: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{(\w+):-([^}]*)\}", fill, (ROOT / name).read_text()))
    return content


def services() -> dict[str, dict[str, Any]]:
    """Of all files together, one entry a service; lists and values of the later file win."""
    found: dict[str, dict[str, Any]] = {}
    for name in FILES:
        for service, content in composed(name)["services"].items():
            found[service] = found.get(service, {}) | content
    return found


# The image.


def test_the_image_ends_as_a_user_without_rights() -> None:
    words = [word for word, _ in instructions()]
    [user] = [rest for word, rest in instructions() if word == "USER"]
    assert user not in ("root", "0")
    made = next(rest for word, rest in instructions() if word == "RUN" and "useradd" in rest)
    assert int(re.findall(r"--uid (\d+)", made)[0]) >= 10_000
    assert user == made.split()[-1]
    assert "RUN" not in words[words.index("USER") :], "nothing is installed by a user who could change it"
    assert "sudo" not in made


def test_the_image_is_made_of_named_things_and_holds_no_secret() -> None:
    for word, rest in instructions():
        assert word in {
            "FROM",
            "ARG",
            "RUN",
            "ENV",
            "WORKDIR",
            "COPY",
            "USER",
            "EXPOSE",
            "HEALTHCHECK",
            "ENTRYPOINT",
            "CMD",
        }
        if word == "FROM":
            assert re.fullmatch(r"python:3\.\d+-slim", rest), "a version, not latest"
        if word in ("ARG", "ENV"):
            assert not re.search(r"KEY|TOKEN|PASS|SECRET", rest, re.IGNORECASE), rest
        if word == "RUN":
            assert not re.search(r"curl|wget|chmod 777|--trusted-host|http://", rest), rest
        if word in ("ENTRYPOINT", "CMD"):
            assert isinstance(json.loads(rest), list), "no shell between the signal and the server"


def test_nothing_is_sent_to_the_builder_that_the_image_does_not_need() -> None:
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in lines, "all is left out that is not named"
    named = {line[1:] for line in lines if line.startswith("!")}
    assert not named & {".", ".env", ".git", "tests", "models"}


# The services.


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_service_is_one_that_weakens_nothing(name: str) -> None:
    content = composed(name)
    assert set(content) <= {"services", "volumes", "configs", "networks", "secrets"}
    for service, keys in content["services"].items():
        assert set(keys) <= SERVICE_KEYS, service


@pytest.mark.parametrize("service", sorted(services()))
def test_every_service_has_as_few_rights_as_it_can(service: str) -> None:
    keys = services()[service]
    assert keys["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in keys["security_opt"]
    assert (keys.get("read_only") is True) == (service not in NOT_READ_ONLY)
    assert re.search(r":[\w.]*\d[\w.-]*$|^cellserve:(cpu|gpu)$", keys["image"]), "a version, not latest"
    assert keys["restart"] == "unless-stopped"
    for mount in keys.get("volumes", ()):
        source, _, rest = mount.partition(":")
        assert not source.startswith("/"), "no folder of the host's but those beside the file"
        assert rest.endswith(":ro") or not source.startswith("."), f"{mount} may be written"
        assert "docker.sock" not in mount


@pytest.mark.parametrize("service", sorted(services()))
def test_every_port_is_on_this_machine_alone_unless_somebody_says_otherwise(service: str) -> None:
    for port in services()[service].get("ports", ()):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port


def test_only_the_server_starts_by_itself() -> None:
    assert [name for name, keys in services().items() if not keys.get("profiles")] == ["cellserve"]


def test_what_a_service_names_is_there() -> None:
    content, all_services = composed("compose.yaml"), services()
    for service, keys in all_services.items():
        assert set(keys.get("depends_on", ())) <= set(all_services), service
        named = {mount.partition(":")[0] for mount in keys.get("volumes", ())}
        assert {name for name in named if not name.startswith(".")} <= set(content["volumes"]), service
        # ./models need not be there: the engine makes an empty folder.
        files = {ROOT / name for name in named if name.startswith(".") and name != "./models"}
        assert not [file for file in files if not file.exists()], service
        assert {entry["source"] for entry in keys.get("configs", ())} <= set(content.get("configs", {})), service


def test_every_variable_of_the_head_is_read_and_every_one_that_is_read_is_in_the_head() -> None:
    text = (ROOT / "compose.yaml").read_text()
    head = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    columns = re.findall(r"^#   ([A-Z][A-Z_, ]+)  ", head.partition("none must:")[2], re.MULTILINE)
    listed = {name for column in columns for name in re.findall(r"\w+", column)}
    read = set(re.findall(r"\$\{(\w+):-", text))
    assert read == listed


def test_every_option_that_is_passed_on_is_one_that_the_server_knows() -> None:
    fields = {ENV_PREFIX + field.upper() for field in Settings.model_fields}
    environment = services()["cellserve"]["environment"]
    assert {name for name in environment if name.startswith(ENV_PREFIX)} <= fields
    assert {name for name in environment if not name.startswith(ENV_PREFIX)} <= {"HF_TOKEN"}


def test_a_service_without_a_check_of_its_own_has_the_images() -> None:
    assert "healthcheck" not in services()["cellserve"], "one check, in the image"
    [check] = [rest for word, rest in instructions() if word == "HEALTHCHECK"]
    assert "/ready" in check
    assert float(re.findall(r"--timeout=(\d+)s", check)[0]) > 4, "longer than the probe's own"


# The image's steps, one after the other.


def steps(app: Path, python: Path, environment: dict[str, str]) -> list[str]:
    """Runs them as a builder does, in `app` for the image's file system; -> the command that the image starts."""
    app.mkdir()
    workdir = app
    entrypoint: list[str] = []
    command: list[str] = []
    for word, rest in instructions():
        if word == "WORKDIR":
            workdir = app / rest.strip("/")
            workdir.mkdir(parents=True, exist_ok=True)
        elif word in ("ENV", "ARG"):
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                environment[name] = value.replace("/cache/", f"{app}/cache/")
            environment["PYTHON"] = str(python)
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                place = workdir / target / (Path(source).name if target.endswith("/") else "")
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, workdir / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, place)
        elif word == "RUN" and not rest.startswith("useradd"):  # the one step that needs a file system of its own
            done = subprocess.run(["bash", "-ec", rest], cwd=workdir, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{rest}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        elif word == "ENTRYPOINT":
            entrypoint = json.loads(rest)
        elif word == "CMD":
            command = json.loads(rest)
    return [*entrypoint, *command]


@pytest.mark.full
def test_the_images_steps_make_a_server_that_answers(tmp_path: Path) -> None:
    """In a fresh environment, which needs a package index; the model comes with the packages."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", ENV_PREFIX))}
    environment = kept | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    name, *arguments = steps(tmp_path / "image", python, environment)
    port = arguments.index("8000")
    # The project itself was installed, not found in some folder.
    shutil.rmtree(tmp_path / "image" / "app")
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        [python.parent / name, *arguments[:port], "0", *arguments[port + 1 :]],
        cwd=tmp_path / "image" / "cache",
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert server.stdout is not None
    try:
        ready = re.match(r"ready: (http://\S+) ", server.stdout.readline())
        assert ready, (tmp_path / "log").read_text()[-3000:]
        [check] = [rest for word, rest in instructions() if word == "HEALTHCHECK"]
        _, flag, script = json.loads(check.partition("CMD ")[2])
        script = script.replace("8000", ready[1].rpartition(":")[2])
        assert subprocess.run([python, flag, script], timeout=30).returncode == 0
        body = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{ready[1]}/v1/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        log.close()
