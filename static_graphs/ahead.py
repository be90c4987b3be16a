"""Compile many kernels at once, which captures would ask for one behind the other: most of a first start.

Triton compiles a kernel when it is first launched, and leaves the interpreter to other threads for most of that time.
So where a first launch had to compile, the launches that are still to come are made on threads before their captures.
Where the kernels were found on disk there is nothing to win, and this costs a launch of everything.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

logger = logging.getLogger(__name__)

MOST_THREADS = 8
"""Each has a stream, for whose products cuBLAS may keep 32 MiB."""


def run_at_once(jobs: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Run the jobs on threads, until the device has done them: each behind the current stream, on its thread's own.

    What fails here fails again where it is wanted, and is told there.
    """
    current = torch.cuda.current_stream(device)
    own = threading.local()

    def begin() -> None:
        own.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(job: Callable[[], object]) -> None:
        stream: torch.cuda.Stream = own.stream
        stream.wait_stream(current)
        try:
            with torch.inference_mode(), torch.cuda.stream(stream):
                job()
        except Exception as error:
            logger.debug("a launch ahead of its capture failed: %s", error)
        stream.synchronize()

    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), max(len(jobs), 1))
    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        list(pool.map(run, jobs))
    torch.cuda.empty_cache()  # what threads allocated is their streams' alone
