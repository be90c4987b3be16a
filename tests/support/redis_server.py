"""A real redis-server for a test, on a Unix socket of its own; Debian's package has it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import redis


class Server:
    """redis-server on a Unix socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self._folder = folder
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            ["redis-server", *options, "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready to accept connections" in line.lower():
                return
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.socket.unlink(missing_ok=True)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)
