"""Tiny byte-level tokenizers, built on the spot."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['content'] | trim }}<|im_end|>{% endfor %}"
)
SYSTEM_LEFT_OUT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
TRIMS_USER = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}<|im_start|>user\n{{ first }}{{ rest[0]['content'] | trim }}<|im_end|>\n"
)
REWRITES = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
DATED = "Today is {{ date_string or strftime_now('%d %b %Y') }}. {{ messages[0]['content'] }}"

_WORDS = "the quick brown fox jumps over the lazy dog and summarises an article in two sentences \n\n user assistant"


def tiny_tokenizer(template: str | None = None, bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """With a chat template or without; `bos` and `eos` say what the tokenizer itself puts around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS] * 20, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    single = f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return fast
