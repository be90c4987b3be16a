"""Whether a load tool got all it asked for. Arguments: guidellm|aiperf|vllm_bench FILE REQUESTS TOKENS."""

import json
import sys
from pathlib import Path


def main() -> None:
    tool, path, requests, tokens = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    told = json.loads(path.read_text())
    if tool == "guidellm":
        metrics = told["benchmarks"][0]["metrics"]
        done, failed = metrics["request_totals"]["successful"], metrics["request_totals"]["errored"]
        drawn = metrics["output_token_count"]["successful"]["total_sum"]
    elif tool == "aiperf":
        done, failed = told["request_count"]["avg"], (told.get("error_request_count") or {"avg": 0})["avg"]
        drawn = told["total_usage_completion_tokens"]["avg"]
    else:
        done, failed, drawn = told["completed"], told["failed"], told["total_output_tokens"]
    assert (done, failed) == (requests, 0), f"{done} of {requests} were answered, {failed} failed"
    assert round(drawn) == requests * tokens, f"{drawn} tokens came, {requests * tokens} were asked for"
    print(f"{tool}: {requests} requests, {requests * tokens} tokens, no failure")


if __name__ == "__main__":
    main()
