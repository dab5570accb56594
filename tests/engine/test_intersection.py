"""What two vocabularies have in common, and how one's tokens are written in the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.engine.checkpoint import Checkpoint
from pipeline.engine.intersection import Intersection, check_vocabularies
from pipeline.engine.vocabularies import Vocabulary
from pipeline.errors import ModelError
from tests.engine.conftest import FolderOf
from tests.engine.vocabulary_pairs import merged_tokenizer, sentencepiece_tokenizer
from tests.models import EOS, TOKENS, byte_tokenizer, tiny_folder

TOKENIZERS = {"bytes": byte_tokenizer, "merged": merged_tokenizer, "pieces": sentencepiece_tokenizer}
PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]


def vocabulary(tokenizer: Any, size: int | None = None) -> Vocabulary:
    return Vocabulary.of(tokenizer, len(tokenizer) if size is None else size)


def intersection(target: Any, draft: Any) -> Intersection:
    return Intersection.of(vocabulary(target), vocabulary(draft))


def written(made: Intersection, token: int) -> list[int]:
    return made.write(np.array([token])).tolist()


def by_name(tokenizer: Any, names: list[str]) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(name) for name in names]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_common_tokens_are_one_to_one_and_stand_for_the_same(ours: str, theirs: str) -> None:
    target, draft = vocabulary(TOKENIZERS[ours]()), vocabulary(TOKENIZERS[theirs]())
    made = Intersection.of(target, draft)
    pairs = list(zip(made.target_ids.tolist(), made.draft_ids.tolist(), strict=True))
    assert len(set(made.target_ids.tolist())) == len(set(made.draft_ids.tolist())) == len(pairs)
    assert made.target_ids.tolist() == sorted(made.target_ids.tolist())
    texts = {t for t in target.written if t} & {t for t in draft.written if t}
    assert {target.written[a] for a, _ in pairs} - {None} == texts
    for a, b in pairs:
        assert target.written[a] == draft.written[b]  # None for both of two special tokens


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_every_token_is_written_with_the_same_bytes_and_a_common_one_as_itself(ours: str, theirs: str) -> None:
    target, draft = vocabulary(TOKENIZERS[ours]()), vocabulary(TOKENIZERS[theirs]())
    made = Intersection.of(target, draft)
    partner = dict(zip(made.target_ids.tolist(), made.draft_ids.tolist(), strict=True))
    contents = {token: content.encode() for content, token in target.specials.items()}
    assert made.vocabulary == target.size
    for token, text in enumerate(target.written):
        pieces = written(made, token)
        assert len(pieces) == made.lengths[token] >= 1
        if token in partner:
            assert pieces == [partner[token]]
        else:
            assert b"".join(draft.written[p] or b"?" for p in pieces) == (text or contents[token])


def test_tokens_are_written_end_to_end() -> None:
    made = intersection(merged_tokenizer(), byte_tokenizer())
    tokens = np.array([5, 200, 7, 260, 0, 1])
    assert made.write(tokens).tolist() == [piece for token in tokens for piece in written(made, token)]
    assert made.write(tokens[:0]).tolist() == []


def test_longest_tokens_that_fit_write_a_token() -> None:
    target, draft = sentencepiece_tokenizer(), merged_tokenizer()
    made = intersection(target, draft)
    (tea,) = by_name(target, ["▁tea"])
    assert written(made, tea) == by_name(draft, ["Ġ", "t", "e", "a"])
    (an,) = by_name(target, ["▁an"])
    assert written(made, an) == by_name(draft, ["Ġ", "an"])
    (the,) = by_name(target, ["▁the"])
    assert written(made, the) == by_name(draft, ["Ġthe"])


def test_special_tokens_meet_special_tokens_of_the_same_content_alone() -> None:
    target, draft = byte_tokenizer(), merged_tokenizer()
    made = intersection(target, draft)
    pairs = dict(zip(made.target_ids.tolist(), made.draft_ids.tolist(), strict=True))
    assert pairs[EOS] == draft.eos_token_id
    plain = sentencepiece_tokenizer()
    plain.add_tokens(["<pad>"])  # an ordinary text that looks like a special token
    (looks,) = by_name(plain, ["<pad>"])
    assert looks not in intersection(target, plain).draft_ids
    assert looks not in intersection(plain, target).target_ids


def test_tokens_that_begin_and_end_a_text_are_partners_where_content_finds_none() -> None:
    target, draft = sentencepiece_tokenizer(), merged_tokenizer()  # <s> </s>, and <s> <eos>
    made = intersection(target, draft)
    pairs = dict(zip(made.target_ids.tolist(), made.draft_ids.tolist(), strict=True))
    assert pairs[target.eos_token_id] == draft.eos_token_id
    assert pairs[target.bos_token_id] == draft.bos_token_id


def test_partner_found_by_content_is_not_given_away_by_its_part() -> None:
    """The token that ends the draft's texts is an ordinary special token of the target, under the same content."""
    target, draft = byte_tokenizer(), merged_tokenizer()
    target.eos_token = "<pad>"
    made = intersection(target, draft)
    pairs = dict(zip(made.target_ids.tolist(), made.draft_ids.tolist(), strict=True))
    assert pairs[EOS] == draft.eos_token_id
    assert target.eos_token_id not in pairs


def test_special_token_without_a_partner_is_written_as_its_content() -> None:
    target, draft = merged_tokenizer(), byte_tokenizer()
    made = intersection(target, draft)
    (turn,) = by_name(target, ["<|turn|>"])
    assert turn not in made.target_ids
    assert draft.decode(written(made, turn)) == "<|turn|>"


def test_end_of_text_that_one_side_lacks_is_no_reason_to_refuse() -> None:
    draft = byte_tokenizer()
    made = Intersection.of(vocabulary(merged_tokenizer()), vocabulary(draft, 256))
    assert merged_tokenizer().eos_token_id not in made.target_ids
    assert draft.decode(written(made, 0)) == "<eos>"


def test_bytes_that_the_draft_has_no_token_for_are_left_out() -> None:
    target, draft = sentencepiece_tokenizer(), merged_tokenizer(lacks="s")
    made = intersection(target, draft)
    assert written(made, by_name(target, ["▁as"])[0]) == by_name(draft, ["Ġ", "a"])
    assert written(made, by_name(target, ["s"])[0]) == by_name(draft, ["Ġ"])
    nothing = intersection(byte_tokenizer(), sentencepiece_tokenizer(fallback=False))
    assert (nothing.lengths >= 1).all()
    space = by_name(sentencepiece_tokenizer(fallback=False), ["▁"])
    assert written(nothing, by_name(byte_tokenizer(), ["Ċ"])[0]) == space


def test_no_id_beyond_either_size_appears() -> None:
    target, draft = byte_tokenizer(), merged_tokenizer()
    made = Intersection.of(vocabulary(target, TOKENS + 13), vocabulary(draft, 150))
    assert made.vocabulary == TOKENS + 13
    assert made.target_ids.max() < TOKENS
    assert max(made.draft_ids.max(), made.pieces.max()) < 150
    assert (made.lengths >= 1).all()


def test_same_tokenizer_has_everything_in_common() -> None:
    made = intersection(merged_tokenizer(), merged_tokenizer())
    assert made.target_ids.tolist() == made.draft_ids.tolist() == list(range(len(merged_tokenizer())))
    assert (made.lengths == 1).all()


# two checkpoints


def with_tokenizer(folder: Path, tokenizer: Any, vocab: int) -> Checkpoint:
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    tiny_folder(folder, "llama", num_hidden_layers=1, vocab=vocab, **ends)
    tokenizer.save_pretrained(folder)
    return Checkpoint(folder, "the-draft")


def test_two_checkpoints_are_compared_below_tokenizer_and_embedding(folder_of: FolderOf, tmp_path: Path) -> None:
    target = Checkpoint(folder_of("llama"), "the-target")
    draft = with_tokenizer(tmp_path / "merged", merged_tokenizer(), 240)  # an embedding of too few rows
    made = check_vocabularies(target, draft)
    assert (made.vocabulary, made.draft_vocabulary) == (TOKENS, 240)
    assert max(made.draft_ids.max(), made.pieces.max()) < 240
    expected = Intersection.of(vocabulary(byte_tokenizer()), vocabulary(merged_tokenizer(), 240))
    assert made.target_ids.tolist() == expected.target_ids.tolist()
    assert made.pieces.tolist() == expected.pieces.tolist()


def test_nothing_in_common_is_refused_with_both_names(folder_of: FolderOf, tmp_path: Path) -> None:
    target = Checkpoint(folder_of("llama"), "the-target")
    draft = with_tokenizer(tmp_path / "merged", merged_tokenizer(), 3)  # special tokens alone
    with pytest.raises(ModelError, match=r"the-draft has no token of text in common with the-target"):
        check_vocabularies(target, draft)


def test_tokenizer_of_another_kind_is_refused_with_its_model(folder_of: FolderOf, tmp_path: Path) -> None:
    from tokenizers import decoders

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    draft = with_tokenizer(tmp_path / "words", tokenizer, TOKENS)
    with pytest.raises(ModelError, match=r"the-draft: .*WordPiece"):
        check_vocabularies(Checkpoint(folder_of("llama"), "the-target"), draft)
