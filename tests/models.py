"""Tiny models with random weights and a tokenizer of bytes: real architectures that run in milliseconds.

    tiny_folder(tmp_path / "llama", "llama", seed=1)      a folder that `resolve` and transformers load
    tiny_model("qwen3", seed=2)                           the module alone

Weights are large enough that greedy texts vary with the prompt, and every architecture has what makes it
awkward: grouped heads, biases, query norms, windows of 8 tokens, mixed layers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from pipeline.engine.conversion import quiet

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
WINDOW = 8
SPECIALS = ("<bos>", "<eos>", "<pad>")
TOKENS = 256 + len(SPECIALS)  # len(tokenizer): bytes first in the tokenizer's own order, then the special ones
BOS, EOS, PAD = range(256, TOKENS)
VOCABULARY = 272  # rows of the embedding: padded beyond the tokens, as real models are

# One beginning-of-text token, and turns that can be told apart.
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
SPECIAL_SHAPE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
    },
}


def tiny_config(model_type: str, vocab: int = VOCABULARY, **changes: Any) -> PreTrainedConfig:
    """A small configuration of an architecture; `changes` go on top."""
    shape = {**SHAPE, **SPECIAL_SHAPE.get(model_type, {}), "vocab_size": vocab, **changes}
    if "num_hidden_layers" in changes and "layer_types" in shape and "layer_types" not in changes:
        kinds = shape["layer_types"]
        shape["layer_types"] = [kinds[i % len(kinds)] for i in range(changes["num_hidden_layers"])]
    return AutoConfig.for_model(model_type, **shape)


def tiny_model(
    model_type: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocab: int = VOCABULARY,
    attn_implementation: str | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """A model with random weights, a function of the arguments alone; leaves torch's own generator as it was."""
    config = copy.deepcopy(tiny_config(model_type, vocab, **changes))
    extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **extra)
        # Biases and norms start as constants in transformers: a bug that ignores them must show.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                with torch.no_grad():
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
            assert parameter.isfinite().all(), name
    return model.to(dtype).eval().requires_grad_(False)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and `<bos>`, `<eos>`, `<pad>` behind them; adds no special tokens of its own accord."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIALS
    # Without an unknown token of ours transformers adds its own to the folders of some architectures.
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": pad}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_folder(
    folder: Path,
    model_type: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vocab: int = VOCABULARY,
    **changes: Any,
) -> Path:
    """Saves a tiny model with its tokenizer as a Hugging Face folder; returns the folder."""
    with quiet():
        tiny_model(model_type, seed, dtype, vocab, **changes).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folder
