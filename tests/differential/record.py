"""Ask a server the whole corpus and write down what it answers.

    PYTHONPATH=tests python -m differential.record http://127.0.0.1:8123 tests/fixtures/vllm_0_32/answers.json

README.md beside this file says how to start the server that the committed recording is of.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx

from differential.answers import ask
from differential.corpus import CASES


def main() -> None:
    url, path = sys.argv[1:]
    lines = []
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client:
        for case in CASES:
            entry = {"request": case.request, "answer": ask(client, case)}
            lines.append(f"{json.dumps(case.name)}: {json.dumps(entry, ensure_ascii=False, separators=(',', ':'))}")
            print(entry["answer"]["status"], case.name)
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
