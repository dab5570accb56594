"""Which architectures are taken and which are refused, by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from pipeline.engine.architecture import check_supported
from pipeline.errors import ModelError
from tests.models import ARCHITECTURES, tiny_config


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_supported_architectures_pass(model_type: str) -> None:
    check_supported(tiny_config(model_type))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "state-space"),
        ("mamba2", "state-space"),
        ("jamba", "state-space or hybrid"),
        ("falcon_h1", "state-space or hybrid"),
        ("qwen3_next", "state-space or hybrid"),
        ("t5", "encoder-decoder"),
        ("gemma3", "multimodal"),
        ("mixtral", "mixture of experts"),
        ("qwen3_moe", "mixture of experts"),
        ("gpt_oss", "mixture of experts"),
        ("gemma2", "caps attention logits"),
        ("gpt2", "not one that is tested"),
    ],
)
def test_other_architectures_are_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"architecture {model_type} is not supported: .*{reason}.*llama"):
        check_supported(AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "caps attention logits"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
    ],
)
def test_variants_that_would_be_silently_wrong_are_refused(
    model_type: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        check_supported(tiny_config(model_type, **changes))


def test_a_rotary_embedding_scaled_by_a_constant_is_fine() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    check_supported(tiny_config("qwen2", rope_parameters=rope))
