"""The engine's door: all that a server needs to hold an engine, and free of torch.

client = ProcessClient(config)              # or InProcessClient.from_config(config)
await client.start()
await client.wait_ready()
async with client.submit(request) as stream:
    async for update in stream:
        ...
await client.close(drain_s=30)
"""

from engine.dispatch import EngineClient, EnginePhase
from engine.inprocess import InProcessClient
from engine.lives import EngineLives
from engine.relay import Relay, RelayedClient
from engine.spawned import ProcessClient
from engine.streams import RequestStream

__all__ = [
    "EngineClient",
    "EngineLives",
    "EnginePhase",
    "InProcessClient",
    "ProcessClient",
    "Relay",
    "RelayedClient",
    "RequestStream",
]
