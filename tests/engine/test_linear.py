"""Packed layers compute what nn.Linear computes, on whatever this processor can do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline.engine import linear
from pipeline.engine.linear import FusedNorm, PackedLinear, fuse_norms, pack_linears, packs_natively
from tests.models import ARCHITECTURES, tiny_model

TOKENS = torch.tensor([[5, 80, 11, 200, 64, 3, 9, 9, 31, 77, 250, 12]])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 65])
def test_a_packed_layer_computes_the_same(rows: int, bias: bool) -> None:
    layer = nn.Linear(96, 40, bias=bias)
    x = torch.randn(1, rows, 96)
    with torch.inference_mode():
        found, expected = PackedLinear(layer)(x), layer(x)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="other kernels go by the rows")
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    layer = PackedLinear(nn.Linear(576, 192))
    x = torch.randn(1, 33, 576)
    together = layer(x)
    for i in (0, 7, 32):
        assert torch.equal(layer(x[:, i : i + 1]), together[:, i : i + 1])
    assert torch.equal(layer(x[:, 3:8]), together[:, 3:8])


def test_without_bfloat16_instructions_only_the_result_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "packs_natively", lambda dtype: dtype is torch.float32)
    layer = nn.Linear(256, 64).to(torch.bfloat16)
    x = torch.randn(1, 5, 256, dtype=torch.bfloat16)
    packed = PackedLinear(layer)
    found = packed(x)
    exact = functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert (packed.compute, found.dtype) == (torch.float32, torch.bfloat16)
    # Half a unit in the last of bfloat16's 8 places, and nothing more.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_layers_run_on_this_processor(dtype: torch.dtype) -> None:
    layer = nn.Linear(64, 48).to(dtype)
    x = torch.randn(1, 3, 64, dtype=dtype)
    found = PackedLinear(layer)(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), layer.float()(x.float()), rtol=2e-2, atol=2e-2)


def test_float32_is_always_native() -> None:
    assert packs_natively(torch.float32)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_packed_model_computes_the_same(model_type: str) -> None:
    model = tiny_model(model_type)
    expected = model(TOKENS).logits
    pack_linears(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


def test_packing_leaves_only_the_embedding_and_the_norms_as_parameters() -> None:
    model = tiny_model("llama")
    pack_linears(model)
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.dim() == 2} == {"embed_tokens"}


def test_a_tied_head_is_packed_and_the_embedding_stays() -> None:
    model = tiny_model("qwen2")
    embedding = model.get_input_embeddings().weight.clone()
    pack_linears(model)
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_packing_twice_changes_nothing() -> None:
    model = tiny_model("llama")
    pack_linears(model)
    expected = model(TOKENS).logits
    pack_linears(model)
    assert torch.equal(model(TOKENS).logits, expected)


def test_other_devices_are_left_alone() -> None:
    layer = nn.Sequential(nn.Linear(4, 4, device="meta"))
    pack_linears(layer)
    assert type(layer[0]) is nn.Linear


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_norms_compute_the_same_in_float32(model_type: str) -> None:
    model = tiny_model(model_type)
    expected = model(TOKENS).logits
    fuse_norms(model)
    assert any(isinstance(module, FusedNorm) for module in model.modules())
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("model_type", "dtype"), [("gemma3_text", torch.float32), ("llama", torch.bfloat16)])
def test_norms_that_compute_otherwise_are_left_alone(model_type: str, dtype: torch.dtype) -> None:
    model = tiny_model(model_type, dtype=dtype)
    fuse_norms(model)
    assert not any(isinstance(module, FusedNorm) for module in model.modules())
