"""A loop that stands still is seen in the metrics."""

from __future__ import annotations

import time

from server.lag import TICK_S
from server.settings import Settings
from support.live_server import live_server, until
from support.scripted import scripted_client


def test_a_loop_that_stood_still_was_late() -> None:
    with live_server(scripted_client(), Settings(access_log=False)) as server:
        name = "cellserve:event_loop_lag_seconds"
        until(lambda: server.metric(f"{name}_count") > 0)
        # Whatever the next tick was due at, it comes half a second later at least.
        server.call(lambda: time.sleep(TICK_S + 0.5))
        until(lambda: server.metric(f"{name}_count") > server.metric(f"{name}_bucket", le="0.25"))
        assert server.metric(f"{name}_sum") >= 0.5
