"""Write the small model of `make serve` as a folder that other programs read: float32 weights, tokenizer, template.

python -m differential.model FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from static_graphs.loading import default_model, export_tokenizer, load_module, locate


def main() -> None:
    folder = Path(sys.argv[1])
    load_module(locate(default_model()), device=torch.device("cpu"), dtype=torch.float32).save_pretrained(folder)
    export_tokenizer(default_model(), folder)
    # Else transformers takes the class of the model's family, which splits text by rules of its own.
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_file.write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
