"""lm-eval's local-completions beside its own Hugging Face backend: every log likelihood to 1e-3.

Arguments: URL MODEL FOLDER. The task is local, so that nothing is fetched. local-completions sends ids, with echo and
logprobs.
"""

import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "x"}

import lm_eval
from lm_eval.tasks import TaskManager

HERE = Path(__file__).parent
TOLERANCE = 1e-3


def scores(backend: str, model_args: dict[str, object]) -> tuple[list[tuple[float, bool]], dict[str, object]]:
    """(log likelihood, is greedy) of every choice, and the metrics."""
    os.chdir(HERE / "lm_eval_task")  # the task's data file has a relative path
    answer = lm_eval.simple_evaluate(
        model=backend,
        model_args=model_args,
        tasks=["facts"],
        task_manager=TaskManager(include_path=str(HERE / "lm_eval_task"), include_defaults=False),
        bootstrap_iters=0,
        batch_size=1,
    )
    pairs = [
        (float(one), bool(greedy)) for sample in answer["samples"]["facts"] for one, greedy in sample["filtered_resps"]
    ]
    return pairs, {name: value for name, value in answer["results"]["facts"].items() if name.startswith("acc")}


def main() -> None:
    url, model, folder = sys.argv[1:4]
    served, told = scores(
        "local-completions",
        {
            "model": model,
            "base_url": f"{url}/v1/completions",
            "tokenizer": folder,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 4,
        },
    )
    right, known = scores("hf", {"pretrained": folder, "dtype": "float32", "device": "cpu"})
    assert len(served) == len(right) == 36, (len(served), len(right))
    worst = max(abs(one[0] - other[0]) for one, other in zip(served, right, strict=True))
    assert worst <= TOLERANCE, f"log likelihoods differ by up to {worst}"
    assert [one[1] for one in served] == [other[1] for other in right], "another token is the likeliest"
    assert told == known, (told, known)
    print(f"lm-eval: {len(served)} log likelihoods within {worst:.1e} of the Hugging Face backend's; {told}")


if __name__ == "__main__":
    main()
