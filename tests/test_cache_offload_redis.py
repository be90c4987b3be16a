"""The Redis tier against a real server: found, expired, half evicted, forged, killed, hung."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cache.offload.chunks import Chunk
from cache.offload.host import HostSlab
from cache.offload.objects import ObjectStores
from cache.offload.records import BadRecord
from cache.offload.redis_tier import RedisTier
from cache.offload.store import Store
from cache.offload.tiers import TierFault
from support.redis_server import Server
from support.tier_chunks import LAYOUT, PAYLOAD_BYTES, path, payload

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs redis-server: apt-get install redis-server"
)
WAIT_S = 10


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def server(shared_server: Server) -> Server:
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.fixture
def tier(server: Server) -> Iterator[RedisTier]:
    tier = RedisTier(server.url, LAYOUT, part_bytes=300)
    yield tier
    tier.close()


def put(tier: RedisTier, *chunks: Chunk) -> list[bool]:
    return [tier.store(chunk, memoryview(payload(chunk))) for chunk in chunks]


def get(tier: RedisTier, chunk: Chunk) -> str:
    memory = bytearray(PAYLOAD_BYTES)
    try:
        tier.load(chunk, memoryview(memory))
    except BadRecord as error:
        return error.reason
    assert bytes(memory) == payload(chunk)
    return "right"


def test_what_was_stored_is_found_by_another_server_of_the_same_namespace(server: Server, tier: RedisTier) -> None:
    chunks = path(1, 3)
    assert tier.known(chunks) == 0
    assert put(tier, *chunks) == [True] * 3
    other = RedisTier(server.url, LAYOUT, part_bytes=300)
    assert (other.known(path(1, 4)), other.known([])) == (3, 0)
    assert [get(other, chunk) for chunk in path(1, 4)] == ["right"] * 3 + ["missing"]
    other.close()


def test_values_are_parts_that_expire(server: Server, tier: RedisTier) -> None:
    put(tier, path(1, 1)[0])
    with server.client() as client:
        names = client.keys("kv:*")
        assert len(names) == -(-LAYOUT.record_bytes // 300)
        assert all(0 < client.ttl(name) <= 24 * 3600 and client.strlen(name) <= 300 for name in names)


def test_a_part_that_redis_evicted_makes_the_whole_chunk_missing_and_the_rest_is_deleted(
    server: Server, tier: RedisTier
) -> None:
    chunk = path(1, 1)[0]
    put(tier, chunk)
    with server.client() as client:
        client.delete(sorted(client.keys("kv:*"))[1])
        assert get(tier, chunk) == "missing"
        assert client.keys("kv:*") == []


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_changed_value_is_refused_and_deleted(server: Server, tier: RedisTier, part: int) -> None:
    chunk = path(1, 1)[0]
    put(tier, chunk)
    with server.client() as client:
        client.setrange(sorted(client.keys("kv:*"))[part], 120, b"\xff\xfe")
        assert get(tier, chunk) in ("checksum", "tokens")
        assert get(tier, chunk) == "missing"
        client.set("unrelated", "x")
        put(tier, chunk)
        client.append(sorted(client.keys("kv:*"))[part], b"x")
        assert get(tier, chunk) == "short"


def test_who_lacks_the_secret_can_neither_forge_nor_read(server: Server, tier: RedisTier) -> None:
    chunk = path(1, 1)[0]
    put(tier, chunk)
    keyed = RedisTier(server.url, replace(LAYOUT, secret=b"ours"), part_bytes=300)
    assert get(keyed, chunk) == "checksum"
    keyed.close()


def test_a_server_killed_and_started_again_under_load_costs_hits_and_nothing_else(tmp_path: Path) -> None:
    server = Server(tmp_path)
    tier = RedisTier(server.url, LAYOUT)
    now = [0.0]
    store = Store(HostSlab(PAYLOAD_BYTES, 2 * PAYLOAD_BYTES), [tier], clock=lambda: now[0])

    def served(name: int) -> int:
        job = ObjectStores([store]).prefetch(path(name, 2), deadline_s=5)
        assert job.wait(WAIT_S)
        job.close()
        return job.arrived

    put(tier, *path(1, 2), *path(2, 2))
    assert [served(1), served(2)] == [2, 2]
    server.kill()
    assert [served(1) for _ in range(5)] == [0] * 5
    counts = store.status()["redis"][2]
    assert (store.status()["redis"][1], counts["fault"], counts["breaker open"]) == ("open", 3, 2)
    server.start()
    put(tier, *path(1, 2))
    now[0] += 5
    assert served(1) == 2
    store.close()
    server.kill()


def test_a_server_that_hangs_is_left_at_the_deadline(tmp_path: Path) -> None:
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(str(tmp_path / "silent.sock"))
    silent.listen()
    tier = RedisTier(f"unix://{tmp_path}/silent.sock", LAYOUT, operation_s=0.05)
    with pytest.raises(TierFault, match="reading from Redis: TimeoutError"):
        get(tier, path(1, 1)[0])
    with pytest.raises(TierFault, match="writing to Redis: TimeoutError"):
        put(tier, path(1, 1)[0])
    tier.close()
    silent.close()


def test_a_server_without_memory_is_full_and_no_fault(server: Server, tier: RedisTier) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        assert put(tier, path(1, 1)[0]) == [False]
        client.config_set("maxmemory", "64mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    assert put(tier, path(1, 1)[0]) == [True]


def test_a_server_that_refuses_to_be_written_is_a_fault(server: Server, tier: RedisTier) -> None:
    """A replica, a wrong password, a failed save: not the same as being full, so the breaker must see it."""
    with server.client() as client:
        client.replicaof("127.0.0.1", 9)
        try:
            with pytest.raises(TierFault, match="writing to Redis: ReadOnlyError"):
                put(tier, path(1, 1)[0])
        finally:
            client.replicaof("no", "one")
    assert put(tier, path(1, 1)[0]) == [True]


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme"):
        RedisTier("http://somewhere", LAYOUT)
