"""transformers' models on a GPU: the matrix over the CUDA attention, and every body as a CUDA graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache.cell_cache import CellCache
from cache.geometry import CacheConfig
from static_graphs.model import model_from_config
from static_graphs.tiny_config import tiny_config
from support.schedules import SEED, differences, reference
from support.tiny_models import ARCHITECTURES, longrope, tiny

pytestmark = pytest.mark.gpu

ALSO = ("gpt_oss", "qwen2_moe", "llama4_text")
WIDTH = 8


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("model_type", ARCHITECTURES + ALSO)
def test_any_schedule_gives_transformers_own_tokens(model_type: str) -> None:
    config = tiny(model_type)
    model = model_from_config(config, device="cuda", seed=SEED)
    assert differences(model, reference(config, device="cuda"), 10, tolerance=1e-3) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", [*ARCHITECTURES, *ALSO, "deepseek_v3", "gemma4_text", "longrope"])
def test_a_body_is_captured_and_replays_what_it_computes_eagerly(model_type: str, dtype: torch.dtype) -> None:
    """No mask is built, no frequency chosen and no expert counted in a way that would wait for the device."""
    if model_type == "longrope":
        config = tiny("phi3", **longrope(original=16, longest=64))
    else:
        config = tiny(model_type) if model_type in (*ARCHITECTURES, *ALSO) else tiny_config(model_type)
    model = model_from_config(config, device="cuda", dtype=dtype)
    cache = CellCache(model.geometry, CacheConfig(64, WIDTH, dtype), model.device)
    sequence = cache.seq_new()
    cache.declare_step(np.full(WIDTH, sequence, dtype=np.int32))
    step = cache.prepare_step(WIDTH)
    tokens, positions = (torch.arange(WIDTH, device="cuda") + at for at in (3, 0))
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # it made the tokens, the weights and the pool
        with torch.cuda.stream(stream):
            eager = model.hidden(tokens, positions, step).clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = model.hidden(tokens, positions, step)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(replayed, eager)
