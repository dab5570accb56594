"""Which model architectures nightdesk can run exactly, and why it refuses the others.

The engine replaces attention and its cache, and lays all sequences of a batch end to end. A model whose
layers carry other state, or whose result depends on its neighbours in the batch, would be silently wrong.
Knows nothing of weights or files.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from pipeline.errors import ModelError

SUPPORTED = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Their frequencies change with the longest sequence of a batch, so a text would depend on its neighbours.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
STATE_KEYS = ("state_size", "ssm_cfg", "mamba_d_state", "mamba_num_heads", "linear_num_value_heads")
TOWER_KEYS = ("vision_config", "audio_config", "text_config", "image_token_id")


def check_supported(config: PretrainedConfig) -> None:
    """Raises ModelError, naming the architecture and the supported ones, unless the engine can run it."""
    reason = _why_not(config)
    if reason is not None:
        name = config.model_type or type(config).__name__
        raise ModelError(f"architecture {name} is not supported: {reason}; supported: {', '.join(SUPPORTED)}")


def _why_not(config: PretrainedConfig) -> str | None:
    if config.model_type not in SUPPORTED:
        return _family(config)
    if getattr(config, "quantization_config", None):
        return "its weights are quantised; use the unquantised model, or a .gguf file (dequantised on load)"
    if getattr(config, "attn_logit_softcapping", None):
        return "it caps attention logits (attn_logit_softcapping)"
    if getattr(config, "use_bidirectional_attention", None):
        return "its attention is not causal (use_bidirectional_attention)"
    if odd := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        return f"it has layers of type {', '.join(odd)}"
    if rope := sorted(_rope_types(config) & BATCH_DEPENDENT_ROPE):
        return f"its rotary embedding ({rope[0]}) depends on the longest sequence of a batch"
    return None


def _family(config: PretrainedConfig) -> str:
    """What kind of model an unknown architecture is, for the message."""
    if config.is_encoder_decoder:
        return "an encoder-decoder model"
    if _has(config, TOWER_KEYS):
        return "a multimodal model"
    layers = set(getattr(config, "layer_types", None) or ())
    if _has(config, STATE_KEYS) or layers & {"linear_attention", "mamba", "mamba2", "conv", "recurrent"}:
        return "a state-space or hybrid model (its state cannot be rolled back)"
    if _has(config, EXPERT_KEYS):
        return "a mixture of experts"
    if getattr(config, "attn_logit_softcapping", None):
        return "it caps attention logits (attn_logit_softcapping)"
    return "not one that is tested to be exact here"


def _has(config: PretrainedConfig, keys: tuple[str, ...]) -> bool:
    return any(getattr(config, key, None) for key in keys)


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Of all layers: the parameters are one mapping, or one mapping per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(mapping.get("rope_type", "default")) for mapping in nested or [parameters]}
