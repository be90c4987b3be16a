"""Packed linears: the same numbers from the same modules, whatever the rows."""

import pytest
import torch
from torch import nn

from static_graphs.model import model_from_config
from static_graphs.pack import PackedLinear, Product, can_pack, pack_linears
from support.tiny_models import tiny_llama

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 130])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(), (1,)])
def test_a_packed_linear_multiplies_as_the_plain_one(rows, bias, leading):
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias)
    given = torch.randn(*leading, rows, 48)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain, Product([plain]))(given), plain(given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_siblings_are_one_product_whatever_order_and_rows_they_are_asked_with(bias):
    torch.manual_seed(0)
    plain = [nn.Linear(48, size, bias=bias) for size in (80, 16, 16)]
    product = Product(plain)
    packed = [PackedLinear(one, product, part) for part, one in enumerate(plain)]
    given = [torch.randn(1, rows, 48) for rows in (1, 5, 5)]
    asked = [(0, 0), (1, 0), (2, 0), (2, 1), (0, 1), (0, 1), (1, 2), (1, 1), (0, 2), (2, 2)]
    with torch.inference_mode():
        for part, rows in asked:
            expected = plain[part](given[rows])
            torch.testing.assert_close(packed[part](given[rows]), expected, rtol=1e-5, atol=1e-5)


def test_a_product_whose_parts_are_all_taken_holds_no_rows():
    plain = [nn.Linear(48, 32, bias=False) for _ in range(2)]
    product = Product(plain)
    given = torch.randn(4, 48)
    with torch.inference_mode():
        product.take(given, 0)
        product.take(given, 1)
    assert (product._rows, product._left) == (None, {})


def test_siblings_that_disagree_are_packed_one_by_one():
    model = model_from_config(tiny_llama())
    attention = model.body.layers[0].self_attn
    attention.k_proj.bias = nn.Parameter(torch.randn(attention.k_proj.out_features))
    hidden = torch.randn(1, 3, 32)
    expected = [part(hidden) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert pack_linears(model) == 2 * 7 + 1
    with torch.inference_mode():
        for part, value in zip((attention.q_proj, attention.k_proj, attention.v_proj), expected, strict=True):
            torch.testing.assert_close(part(hidden), value, rtol=1e-5, atol=1e-5)


def test_every_linear_of_a_model_is_packed_and_its_logits_stay():
    model = model_from_config(tiny_llama())
    hidden = torch.randn(5, 32)
    with torch.inference_mode():
        before = model.logits(hidden)
        assert pack_linears(model) == 2 * 7 + 1
        torch.testing.assert_close(model.logits(hidden), before, rtol=1e-5, atol=1e-5)
    for root in (model.body, model.head):
        assert not [part for part in root.modules() if type(part) is nn.Linear]


def test_a_tied_weight_stays_for_the_embedding():
    model = model_from_config(tiny_llama(tie_word_embeddings=True))
    pack_linears(model)
    assert model.module.get_input_embeddings().weight.shape == (64, 32)


def test_a_subclass_of_linear_is_left_alone():
    class Scaled(nn.Linear):
        def forward(self, rows):
            return 2 * super().forward(rows)

    model = model_from_config(tiny_llama())
    mlp = model.body.layers[0].mlp
    mlp.down_proj = Scaled(48, 32, bias=False)
    assert pack_linears(model) == 2 * 7
    assert type(mlp.down_proj) is Scaled


def test_what_cannot_be_packed_is_not_asked_for():
    assert can_pack(CPU, torch.float32)
    assert not can_pack(CPU, torch.float64)
    assert not can_pack(torch.device("cuda"), torch.float32)
