"""What vLLM's tests would download, from the folder of the model that is served."""

import os

import vllm.config
import vllm.tokenizers
from vllm.transformers_utils import repo_utils

FOLDER = os.environ["SUT_FOLDER"]

_get_tokenizer = vllm.tokenizers.get_tokenizer


def get_tokenizer(tokenizer_name=None, *args, **options):
    return _get_tokenizer(FOLDER)


class NoHub:
    def snapshot_download(self, *args, **options):
        return FOLDER


class ModelConfig:
    def __init__(self, *args, **options):
        pass

    def get_vocab_size(self):
        return len(get_tokenizer())


vllm.tokenizers.get_tokenizer = get_tokenizer
vllm.config.ModelConfig = ModelConfig
repo_utils.hf_api = NoHub
