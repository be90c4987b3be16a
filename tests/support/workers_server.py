"""A server of several API processes on a scripted engine: `python -m support.workers_server MODEL OPTIONS`.

MODEL is a scene of support/scripted_process.py. `support.scripted_server.ServerProcess` is the test's end.
"""

from __future__ import annotations

import sys

from engine.client import Relay
from server import cli, run, settings, workers


def main() -> int:
    args = cli.parse(["serve", *sys.argv[1:]])
    options = settings.load(cli.flags_of(args), args.config).settings
    with run.listening(options) as listeners:
        return workers.serve(
            options,
            listeners,
            make_relay=lambda chosen, folder: Relay(
                chosen.to_engine_config(), folder, module="support.scripted_process"
            ),
        )


if __name__ == "__main__":
    sys.exit(main())
