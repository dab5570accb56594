"""Writes a tiny Qwen2 model as a GGUF file, the way llama.cpp's converter lays one out."""

from __future__ import annotations

from pathlib import Path

import gguf
from transformers import PreTrainedModel

from tests.models import BOS, CHAT_TEMPLATE, EOS, TOKENS, byte_tokenizer, tiny_model

BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tiny_gguf(path: Path, seed: int = 0, end_of_turn: int | None = None) -> PreTrainedModel:
    """Writes the file and returns the model that is in it (float32)."""
    model = tiny_model("qwen2", seed, vocab=TOKENS + 1, tie_word_embeddings=False)
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_tokenizer(writer, end_of_turn)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: gguf.GGUFWriter, end_of_turn: int | None) -> None:
    tokens = byte_tokenizer().convert_ids_to_tokens(list(range(TOKENS)))
    merged = tokens[0] + tokens[1]  # the format wants at least one merge
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, merged])
    kinds = [gguf.TokenType.NORMAL] * BOS + [gguf.TokenType.CONTROL] * (TOKENS - BOS)
    writer.add_token_types([*kinds, gguf.TokenType.NORMAL])
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    if end_of_turn is not None:
        writer.add_eot_token_id(end_of_turn)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{BLOCK_NAMES[stem]}.{kind}"
