"""`python -m tests.load.shape_folder 8b FOLDER`: a published shape to serve with --load-format dummy, with text.

Writes config.json and a tokenizer that has a word for every id: byte-level, no merges. So the whole path from ids to
streamed text is timed at the true vocabulary size, without a download.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from static_graphs.shapes import SHAPES, write_config


def write_folder(shape: str, folder: Path) -> Path:
    """-> folder, made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(shape, folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"Ġw{number}" for number in range(SHAPES[shape]["vocab_size"] - len(letters))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


if __name__ == "__main__":
    print(write_folder(sys.argv[1], Path(sys.argv[2])))
