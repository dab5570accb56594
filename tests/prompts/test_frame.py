"""What chat templates put around the words, and those that can't be used."""

from __future__ import annotations

import pytest

from pipeline.errors import ConfigError, ModelError
from pipeline.prompts.frame import Frame, find_frame
from tests.prompts.tiny_tokenizers import (
    CHATML,
    DATED,
    NO_SYSTEM,
    REWRITES,
    SYSTEM_LEFT_OUT,
    TRIMS_USER,
    WITH_BOS,
    tiny_tokenizer,
)


def test_a_model_without_chat_template_has_an_empty_frame() -> None:
    assert find_frame(tiny_tokenizer(), False, "summary") == Frame()


def test_the_frame_is_what_the_template_writes_around_the_words() -> None:
    assert find_frame(tiny_tokenizer(WITH_BOS), False, "summary") == Frame(
        between="<s><|im_start|>user\n", after="<|im_end|>\n<|im_start|>assistant\n", chat=True
    )
    assert find_frame(tiny_tokenizer(CHATML), True, "summary") == Frame(
        "<|im_start|>system\n",
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
        chat=True,
    )


def test_trimming_is_noticed_for_each_role() -> None:
    assert find_frame(tiny_tokenizer(TRIMS_USER), True, "summary") == Frame(
        "<s><|im_start|>user\n", "\n\n", "<|im_end|>", trims_system=False, trims_user=True, chat=True
    )
    assert find_frame(tiny_tokenizer(NO_SYSTEM), False, "summary").trims_user


@pytest.mark.parametrize("template", [None, NO_SYSTEM, SYSTEM_LEFT_OUT])
def test_a_system_prompt_without_a_place_is_refused(template: str | None) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.summary\.system: no place for a system prompt .*move its words"):
        find_frame(tiny_tokenizer(template), True, "summary")


def test_a_template_that_rewrites_messages_is_refused() -> None:
    with pytest.raises(ModelError, match="rewrites messages"):
        find_frame(tiny_tokenizer(REWRITES), False, "summary")


def test_a_template_that_fails_is_a_named_error() -> None:
    with pytest.raises(ModelError, match=r"tasks\.summary: .*template fails"):
        find_frame(tiny_tokenizer("{{ raise_exception('no') }}"), False, "summary")


def test_the_date_in_a_template_does_not_change_overnight() -> None:
    assert find_frame(tiny_tokenizer(DATED), False, "summary").between == "Today is 26 Jul 2024. "
