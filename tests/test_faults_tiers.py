"""Faults below the pool: a tier that lies, breaks or goes away costs hits, and nobody a token (F29 .. F41).

Eight bystanders begin with prefixes that a tier holds. Each kind breaks the tier before, while or after they ask for
them; whatever comes of it, their tokens are those of the plain model.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from cache.offload.chunks import Namespace, chunks_of, geometry_record
from cache.offload.disk import DiskTier
from cache.offload.records import Layout
from engine.faults import Faults, checked
from support.redis_server import Server
from support.tier_chunks import FakeTier
from support.tiered import CHUNK, GREEDY, Tiered, tokens
from support.toy_decoder import ToyDecoder

PREFIXES = [tokens(500 + number, 33) for number in range(3)]
"""Two whole chunks each, and one token more."""
PROMPTS = {f"bystander {number}": [*PREFIXES[number % 3], *tokens(600 + number, 3)] for number in range(8)}
NEW = 8
needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs redis-server: apt-get install redis-server"
)


@pytest.fixture(scope="module")
def model() -> ToyDecoder:
    return ToyDecoder()


@dataclass
class Scene:
    """What a kind may break."""

    model: ToyDecoder
    folder: Path
    monkeypatch: pytest.MonkeyPatch
    tier: FakeTier = field(default_factory=FakeTier)
    redis: Server | None = None

    def on_fake(self) -> Tiered:
        return Tiered(self.model, self.tier)

    def on_disk(self) -> Tiered:
        return Tiered(self.model, folder=self.folder)

    def on_redis(self) -> Tiered:
        assert self.redis is not None
        return Tiered(self.model, url=self.redis.url)

    @property
    def segments(self) -> list[Path]:
        return sorted(self.folder.rglob("*.seg"))


@dataclass(frozen=True)
class Kind:
    """One fault: where, and what happens between the run that fills the tier and the bystanders, or during them."""

    make: Callable[[Scene], Tiered]
    breaks: Callable[[Scene], None] = lambda scene: None
    meanwhile: Callable[[Scene, Tiered], None] = lambda scene, engine: None
    """When the bystanders are queued and have run a step."""
    marks: tuple[pytest.MarkDecorator, ...] = ()
    costs_hits: bool = True
    """Whether less is found than without the fault, as far as that is certain."""


def _refuse(scene: Scene, name: str, number: int) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    scene.monkeypatch.setattr(os, name, fail)


def _truncate(scene: Scene) -> None:
    for segment in scene.segments:
        os.truncate(segment, 3 * segment.stat().st_size // 100)  # it was made as long as it may become


def _flip(scene: Scene) -> None:
    for segment in scene.segments:
        content = bytearray(segment.read_bytes())
        for at in range(0, len(content), 997):
            content[at] ^= 16
        segment.write_bytes(content)


def _foreign(scene: Scene) -> None:
    """Another model's records of the same texts, in a folder that bears this one's name."""
    (own,) = (path for path in scene.folder.iterdir() if path.is_dir())
    engine = Tiered(scene.model)
    payload = bytes(engine.transfers.chunk_bytes)
    engine.close()
    space = Namespace("another", "float32", geometry_record(scene.model.geometry), "table")
    other = scene.folder.parent / "other"
    tier = DiskTier(other, space, Layout(space.digest, CHUNK, len(payload)), 8 << 20)
    for prefix in PREFIXES:
        for chunk in chunks_of(space, np.array(prefix, np.int64), CHUNK):
            assert tier.store(chunk, memoryview(payload))
    tier.close()
    shutil.rmtree(own)
    (other / space.digest.hex()).rename(own)


def _swap(scene: Scene) -> None:
    """Every key's value is another key's."""
    assert scene.redis is not None
    with scene.redis.client() as client:
        names = sorted(client.keys("kv:*"))
        values = [client.get(name) for name in names]
        for name, value in zip(names, values[1:] + values[:1], strict=True):
            client.set(name, value)


def _kill(scene: Scene) -> None:
    assert scene.redis is not None
    scene.redis.kill()


def _stop(scene: Scene) -> None:
    assert scene.redis is not None
    scene.redis._process.send_signal(signal.SIGSTOP)


def _restart(scene: Scene, engine: Tiered) -> None:
    _kill(scene)
    for _ in range(3):
        engine.step()
    assert scene.redis is not None
    scene.redis.start()


def _cancel_half(scene: Scene, engine: Tiered) -> None:
    """While their prefixes are on their way, which arrive for nobody."""
    engine.submit("left", [*PREFIXES[0], 1], max_new_tokens=NEW, sampling=GREEDY)
    engine.submit("left too", [*PREFIXES[1], 2], max_new_tokens=NEW, sampling=GREEDY)
    engine.step()
    engine.loop.cancel("left")
    engine.loop.cancel("left too")
    scene.tier.release()


def _evict(scene: Scene, engine: Tiered) -> None:
    """What the tier said it has is gone when it is asked for it."""
    scene.tier.records.clear()
    scene.tier.release()


KINDS = {
    "no fault on disk": Kind(Scene.on_disk, costs_hits=False),
    "no fault in redis": Kind(Scene.on_redis, marks=(needs_redis,), costs_hits=False),
    "no fault elsewhere": Kind(Scene.on_fake, costs_hits=False),
    "f29 pinned memory refused": Kind(lambda scene: Tiered(scene.model, scene.tier, slots=1), costs_hits=False),
    "f30 disk full": Kind(Scene.on_disk, lambda scene: _refuse(scene, "pwrite", errno.ENOSPC), costs_hits=False),
    "f31 disk read error": Kind(Scene.on_disk, lambda scene: _refuse(scene, "preadv", errno.EIO)),
    "f32 truncated file": Kind(Scene.on_disk, _truncate),
    "f33 flipped bits": Kind(Scene.on_disk, _flip),
    "f34 foreign header": Kind(Scene.on_disk, _foreign),
    "f35 redis refused": Kind(Scene.on_redis, _kill, marks=(needs_redis,)),
    "f36 redis hangs": Kind(Scene.on_redis, _stop, marks=(needs_redis,)),
    "f37 another key's value": Kind(Scene.on_redis, _swap, marks=(needs_redis,)),
    "f38 redis restarts in mid-load": Kind(Scene.on_redis, meanwhile=_restart, marks=(needs_redis,), costs_hits=False),
    "f39 f40 left in mid-load": Kind(Scene.on_fake, lambda scene: scene.tier.hold(), _cancel_half, costs_hits=False),
    "f41 evicted between match and load": Kind(Scene.on_fake, lambda scene: scene.tier.hold(), _evict),
    "the tier fails": Kind(Scene.on_fake, lambda scene: setattr(scene.tier, "fault", "gone")),
    "the tier's bytes are wrong": Kind(Scene.on_fake, lambda scene: scene.tier.corrupt_all()),
}


@pytest.fixture
def scene(model: ToyDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(model, tmp_path / "kv", monkeypatch)
    yield scene
    monkeypatch.undo()
    if scene.redis is not None:
        scene.redis._process.send_signal(signal.SIGCONT)
        scene.redis.kill()


UNDISTURBED = 3 * 2 * CHUNK
"""Tokens that come from a tier into the pool: each prefix once."""


def loaded_tokens(engine: Tiered) -> int:
    report = engine.loop.kv_report().tiers
    assert report is not None
    return report.loaded_tokens


def run_bystanders(model: ToyDecoder, engine: Tiered, meanwhile: Callable[[], None] = lambda: None) -> None:
    for name, prompt in PROMPTS.items():
        engine.submit(name, prompt, max_new_tokens=NEW, sampling=GREEDY)
    engine.step()
    meanwhile()
    engine.run()
    for name, prompt in PROMPTS.items():
        assert engine.tokens(name) == model.continuation(prompt, NEW), name
        assert engine.finish(name) == "length"
    assert checked(engine.loop)["problems"] == []


@pytest.mark.parametrize("name", [pytest.param(name, marks=kind.marks) for name, kind in KINDS.items()])
def test_a_broken_tier_costs_hits_and_nobody_a_token(scene: Scene, tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    if needs_redis in kind.marks:
        scene.redis = Server(tmp_path)
    first = kind.make(scene)
    for number, prefix in enumerate(PREFIXES):
        first.ask(f"fills {number}", prefix)
    first.close()
    kind.breaks(scene)
    second = kind.make(scene)
    run_bystanders(scene.model, second, lambda: kind.meanwhile(scene, second))
    from_tiers = loaded_tokens(second)
    if kind.costs_hits:
        assert from_tiers < UNDISTURBED, "the fault was not there"
    if name.startswith("no fault"):
        assert from_tiers == UNDISTURBED
    scene.monkeypatch.undo()
    if scene.redis is not None:
        scene.redis._process.send_signal(signal.SIGCONT)
    scene.tier.release()
    scene.tier.fault = None
    second.close()


@pytest.mark.parametrize("point", ["tier.raise", "tier.corrupt", "tier.full", "tier.slow"])
@pytest.mark.parametrize("after", [0, 2])
def test_the_hooks_of_the_tiers_cost_hits_and_nobody_a_token(scene: Scene, point: str, after: int) -> None:
    first = scene.on_disk()
    for number, prefix in enumerate(PREFIXES):
        first.ask(f"fills {number}", prefix)
    first.close()
    second = scene.on_disk()
    faults = Faults()
    faults.fit(second.loop)
    faults.arm(point, after=after, times=3, s=0.05)
    run_bystanders(scene.model, second)
    second.close()
    assert faults.fired or point == "tier.full"


@pytest.mark.full
@pytest.mark.parametrize("moment", range(12))
@pytest.mark.parametrize("fault", ["gone", "corrupt", "evicted", "released late"])
def test_a_tier_that_breaks_at_any_step_costs_nobody_a_token(scene: Scene, fault: str, moment: int) -> None:
    first = scene.on_fake()
    for number, prefix in enumerate(PREFIXES):
        first.ask(f"fills {number}", prefix)
    first.close()
    engine = scene.on_fake()
    scene.tier.hold()

    def later() -> None:
        for _ in range(moment):
            engine.step()
        match fault:
            case "gone":
                scene.tier.fault = "gone"
            case "corrupt":
                scene.tier.corrupt_all()
            case "evicted":
                scene.tier.records.clear()
        scene.tier.release()

    run_bystanders(scene.model, engine, later)
    scene.tier.fault = None
    engine.close()
