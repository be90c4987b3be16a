"""Compile many kernels at once, which captures would ask for one behind the other: most of a first start.

Triton compiles a kernel when it is first launched, and leaves the interpreter to other threads for most of that time.
So where a first launch had to compile, the launches that are still to come are made on threads before their captures.
Where the kernels were found on disk there is nothing to win, and this costs a launch of everything.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

logger = logging.getLogger(__name__)

MOST_THREADS = 8
"""A job's products may keep 32 MiB of cuBLAS's for its stream."""


def run_at_once(jobs: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Run the jobs on threads, each on a stream of its own behind the current one, until the device has done them.

    What fails here fails again where it is wanted, and is told there.
    """
    current = torch.cuda.current_stream(device)

    def run(job: Callable[[], object]) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        try:
            with torch.inference_mode(), torch.cuda.stream(stream):
                job()
        except Exception as error:
            logger.debug("a launch ahead of its capture failed: %s", error)
        stream.synchronize()

    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)), max(len(jobs), 1))) as pool:
        list(pool.map(run, jobs))
    torch.cuda.empty_cache()  # what threads allocated is their streams' alone
