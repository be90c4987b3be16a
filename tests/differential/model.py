"""Write the small model of `make serve` as a folder that other programs read: float32 weights, tokenizer, template.

python -m differential.model FOLDER           the model itself
python -m differential.model FOLDER --tiny    its tokenizer over a config of two narrow layers, for --load-format dummy
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig

from static_graphs.loading import default_model, export_tokenizer, load_config, load_module, locate

NARROW = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def main() -> None:
    folder = Path(sys.argv[1])
    source = locate(default_model())
    if "--tiny" in sys.argv:
        LlamaConfig.from_dict(load_config(source).to_dict() | NARROW).save_pretrained(folder)
    else:
        load_module(source, device=torch.device("cpu"), dtype=torch.float32).save_pretrained(folder)
    export_tokenizer(default_model(), folder)
    # Else transformers takes the class of the model's family, which splits text by rules of its own.
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_file.write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
