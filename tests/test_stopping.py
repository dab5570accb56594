"""Stop strings: where they cut tokens and text, whatever the blocks (DESIGN section 5), against a naive reference."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pipeline import stopping
from pipeline.stopping import Cut, StopWatch
from pipeline.wording import Wording
from tests.test_wording import byte_level, byte_name, ids, sentencepiece

R = "\ufffd"
YOU, SMILE = "你".encode(), "😀".encode()
# Tokens that begin and end inside of characters, as trained byte-level vocabularies have them.
MERGED = [
    *(
        b"ab",
        b"ST",
        b"STO",
        b"TOP",
        b"OP",
        b" S",
        b"P.",
        b"xSTOPy",
        b"STOPSTOP",
        b"\xffSTO",
        b"OP\xff",
        b"\xff\xff\xff",
    ),
    *(
        YOU,
        YOU[:2],
        YOU[1:],
        YOU[2:] + b"ST",
        b"x" + YOU[:1],
        b"P" + YOU[:2],
        SMILE[:2],
        SMILE[2:],
        SMILE[3:] + YOU[:1],
    ),
    *(YOU[2:] + YOU[:1], YOU[2:] + b"a" + YOU[:1]),
]
MOST = 24  # tokens
Watch = Callable[..., StopWatch]


@cache
def merged() -> Wording:
    """A byte-level vocabulary: all bytes, MERGED, two special tokens and one that is none."""
    names = ["".join(map(byte_name, token)) for token in [*(bytes([b]) for b in range(256)), *MERGED]]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(dict.fromkeys(names))}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    tokenizer.add_tokens(["<tool>"])
    return Wording(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"))


def token(data: bytes) -> int:
    return merged().tokenizer.convert_tokens_to_ids("".join(map(byte_name, data)))


def watched(
    stops: tuple[str, ...],
    raw: Callable[[list[int]], str],
    tokens: list[int],
    blocks: list[int] | None = None,
    at_least: int = 0,
    watch: Watch = StopWatch,
) -> Cut | None:
    """The watch's answer to tokens in blocks of these lengths, over and over (None: one by one)."""
    one = watch(stops, raw, at_least)
    so_far: list[int] = []
    lengths = itertools.cycle(blocks or [1])
    while len(so_far) < len(tokens):
        new = tokens[len(so_far) : len(so_far) + next(lengths)]
        so_far.extend(new)
        cut = one.look(so_far, len(new))
        if cut is not None:
            return cut
    return None


# ------------------------------------------------------------------------------------------------- the reference


def characters(wording: Wording, tokens: list[int]) -> list[tuple[str, int]]:
    """The text, character by character, each with the first token that writes on it. Not by the tokenizer."""
    names = wording.tokenizer.convert_ids_to_tokens(tokens)
    specials = set(wording.tokenizer.all_special_tokens) - {"<unk>"}
    kept = [(name, n) for n, name in enumerate(names) if name not in specials]
    if "<0x0A>" not in wording.tokenizer.get_vocab():
        byte_of = {byte_name(b): b for b in range(256)}
        return lossy([(byte_of[character], n) for name, n in kept for character in name])
    found: list[tuple[str, int]] = []
    for is_byte, group in itertools.groupby(kept, lambda named: named[0].startswith("<0x")):
        if is_byte:
            run = [(int(name[3:5], 16), n) for name, n in group]
            read = lossy(run)
            found += [(R, n) for _, n in run] if any(c == R for c, _ in read) else read
        else:
            found += [(character.replace("▁", " "), n) for name, n in group for character in name]
    strips = b'"Strip"' in wording.tokenizer.backend_tokenizer.decoder.__getstate__()
    return found[1:] if strips and found and found[0][0] == " " else found


def lossy(written: list[tuple[int, int]]) -> list[tuple[str, int]]:
    found, data, at = [], bytes(byte for byte, _ in written), 0
    while at < len(data):
        length = 1
        for end in range(at + 1, min(at + 4, len(data)) + 1):
            try:
                character = data[at:end].decode()
            except UnicodeDecodeError as error:
                character, length = R, error.end
                continue
            length = end - at
            break
        found.append((character, written[at][1]))
        at += length
    return found


def common(a: str, b: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def naive(stops: tuple[str, ...], wording: Wording, tokens: list[int], at_least: int = 0) -> Cut | None:
    """One token at a time, everything read again; the contract word by word."""
    earlier = [""]
    for position in range(1, len(tokens) + 1):
        written = characters(wording, tokens[:position])
        text = "".join(character for character, _ in written)
        assert text == wording.raw(tokens[:position])
        text = text.rstrip(R)
        known = max(common(text, before) for before in earlier)
        earlier.append(text)
        places = [
            (begin + len(stop), begin) for stop in stops for begin in range(len(text)) if text[begin:].startswith(stop)
        ]
        fresh = [place for place in places if place[0] > known]
        if fresh and position > at_least:
            begin = min(fresh)[1]
            return Cut(written[begin][1], text[:begin].rstrip(R))
    return None


# ------------------------------------------------------------------------------------------------- the contract

Case = tuple[list[int], tuple[str, ...], int, Cut | None]


def contract() -> dict[str, Case]:
    """Tokens, stop strings, at_least, answer."""
    a, b, stop, eos = token(b"a"), token(b"b"), list(b"STOP"), merged().tokenizer.eos_token_id
    stop = [token(bytes([byte])) for byte in stop]
    pad, tool = merged().tokenizer.convert_tokens_to_ids(["<pad>", "<tool>"])
    assert eos is not None
    return {
        "no stop string": ([a, b, a], (), 0, None),
        "none in the text": ([a, b, a], ("STOP",), 0, None),
        "one token": ([a, b, token(b"ST"), token(b"OP"), a], ("STOP",), 0, Cut(2, "ab")),
        "at the very beginning": ([*stop, a], ("STOP",), 0, Cut(0, "")),
        "one character": ([a, a, b, a], ("b",), 0, Cut(2, "aa")),
        "over many tokens": ([a, *stop, a], ("STOP",), 0, Cut(1, "a")),
        "begun twice": ([a, *stop[:3], *stop, a], ("STOP",), 0, Cut(4, "aSTO")),
        "inside of a token": ([a, token(b"xSTOPy"), a], ("STOP",), 0, Cut(1, "ax")),
        "begins inside of a token": ([a, token(b" S"), *stop[1:], a], ("STOP",), 0, Cut(1, "a ")),
        "ends inside of a token": ([a, *stop[:3], token(b"P."), a], ("STOP",), 0, Cut(1, "a")),
        "twice in a token": ([token(b"STOPSTOP"), a], ("STOP",), 0, Cut(0, "")),
        "a character of several tokens": ([a, token(YOU[:2]), token(YOU[2:] + b"ST"), a], ("你S",), 0, Cut(1, "a")),
        "a token ends with its first byte": ([a, token(b"x" + YOU[:1]), token(YOU[1:]), a], ("你",), 0, Cut(1, "ax")),
        "a token begins with the last byte before it": (
            [a, token(YOU[:2]), token(YOU[2:] + b"ST"), token(b"OP")],
            ("STOP",),
            0,
            Cut(2, "a你"),
        ),
        "an unfinished character before it": ([a, token(YOU[:2]), *stop], ("STOP",), 0, Cut(2, "a")),
        "an unfinished character behind it": ([a, *stop[:3], token(b"P" + YOU[:2])], ("STOP",), 0, Cut(1, "a")),
        "the one that ends first": ([a, token(b"xSTOPy")], ("OPy", "STO"), 0, Cut(1, "ax")),
        "of those the one that begins first": ([a, token(b"xSTOPy")], ("OP", "STOP"), 0, Cut(1, "ax")),
        "one inside the other, in a token": ([a, token(b"xSTOPy")], ("STOPy", "TO"), 0, Cut(1, "axS")),
        "one inside the other": ([a, *stop], ("STOP", "TO"), 0, Cut(2, "aS")),
        "overlapping": ([a, *stop], ("OPa", "STOP"), 0, Cut(1, "a")),
        "the earlier token, not the earlier beginning": ([*stop, a], ("STOPa", "TO"), 0, Cut(1, "S")),
        "special tokens before it stay": ([a, pad, pad, *stop], ("STOP",), 0, Cut(3, "a")),
        "special tokens inside of it go": ([a, *stop[:2], pad, *stop[2:]], ("STOP",), 0, Cut(1, "a")),
        "special tokens inside of a character": ([a, token(YOU[:1]), pad, token(YOU[1:])], ("你",), 0, Cut(1, "a")),
        "the name of a token that is not special": ([a, tool, b], ("<tool>",), 0, Cut(1, "a")),
        "the name of a special token": ([a, pad, b], ("<pad>",), 0, None),
        "completed too early": ([a, *stop, b, b], ("STOP",), 5, None),
        "completed at the first token that counts": ([a, *stop, b, b], ("STOP",), 4, Cut(1, "a")),
        "too early, then again": ([*stop, a, *stop, b], ("STOP",), 4, Cut(5, "STOPa")),
        "too early, then overlapping itself": ([a, a, a, b], ("aa",), 2, Cut(1, "a")),
        "too early and a longer one at that place": ([*stop, a], ("STO", "STOPa"), 4, Cut(0, "")),
        "longer than any window": ([a, b] * 40 + [*stop] + [a] * 9, ("ab" * 39 + "STOPa",), 0, Cut(2, "ab")),
        "a replacement character": ([a, token(b"\xff"), b, a], (R + "b",), 0, Cut(1, "a")),
        "replacement characters, counted": ([a] + [token(b"\xff")] * 9 + [b, a], (R * 8 + "b",), 0, Cut(2, "a")),
        "more of them than a window holds": ([a] + [token(b"\xff")] * 99 + [b], (R * 90 + "b",), 0, Cut(10, "a")),
        "none where a character is unfinished": ([a, token(YOU[:2]), token(YOU[2:] + b"ST"), a], (R,), 0, None),
    }


@pytest.mark.parametrize("name", contract())
def test_the_contract_whatever_the_blocks(name: str) -> None:
    tokens, stops, at_least, expected = contract()[name]
    for blocks in ([1], [2], [3], [4], [5], [1, 3], [3, 1], [len(tokens)]):
        assert watched(stops, merged().raw, tokens, blocks, at_least) == expected, blocks
    if "<tool>" not in stops:
        assert naive(stops, merged(), tokens, at_least) == expected


def test_the_limit_in_the_same_block_leaves_the_two_tokens_before_the_stop_string() -> None:
    ten, eleven, stop = token(b"a"), token(b"b"), token(b"xSTOPy")
    tokens = [ten, eleven, stop, ten, eleven]  # cut at five by the limit
    assert watched(("xSTOPy",), merged().raw, tokens, [5]) == Cut(2, "ab")


def test_the_watch_speaks_in_the_call_that_brings_the_completing_token() -> None:
    watch, tokens = StopWatch(("STOP",), merged().raw), [token(bytes([b])) for b in b"abSTOPab"]
    assert watch.look(tokens[:3], 3) is None
    assert watch.look(tokens[:5], 2) is None
    assert watch.look(tokens[:5], 0) is None
    assert watch.look(tokens[:8], 3) == Cut(2, "ab")


def test_an_empty_stop_string_stops_nothing() -> None:
    assert watched(("",), merged().raw, [token(b"a")] * 3) is None


def test_the_tokens_given_are_left_alone() -> None:
    tokens = [token(b"a"), token(b"xSTOPy")]
    StopWatch(("STOP",), merged().raw).look(tokens, 2)
    assert tokens == [token(b"a"), token(b"xSTOPy")]


def test_a_space_that_the_decoder_drops_at_the_beginning_is_no_text() -> None:
    wording = sentencepiece()
    assert watched((" word",), wording.raw, ids(wording, "▁word", "T")) is None
    assert watched((" word",), wording.raw, ids(wording, "▁word", "▁word", "T")) == Cut(1, "word")
    assert watched(("word",), wording.raw, ids(wording, "▁word", "T")) == Cut(0, "")
    assert watched((" word",), wording.raw, ids(wording, "</s>", "</s>", "T", "</s>", "▁word"), [1]) == Cut(4, "T")


def test_a_byte_that_spoils_a_run_does_not_take_back_a_stop_string_seen_before() -> None:
    wording = sentencepiece()
    tokens = ids(wording, "S", YOU, b"\xff", "T")
    assert wording.raw(tokens) == "S" + R * 4 + "T"
    for blocks in ([1], [2], [6]):
        assert watched(("你",), wording.raw, tokens, blocks) == Cut(1, "S")


def test_a_character_taken_back_and_given_again_is_completed_once() -> None:
    wording = sentencepiece()
    tokens = ids(wording, YOU, YOU, "T")
    for blocks in ([1], [2], [7]):
        assert watched(("你",), wording.raw, tokens, blocks, at_least=3) == Cut(3, "你")
        assert watched(("你",), wording.raw, tokens, blocks, at_least=6) is None


# ------------------------------------------------------------------------------------------------- any tokens

POOLS: dict[str, tuple[Callable[[], Wording], list[bytes | str], tuple[str, ...]]] = {
    "byte-level": (
        merged,
        [*MERGED, *(bytes([b]) for b in b"abSTOP x.\xff\xef\xbf\xbd\xf0" + YOU + SMILE), "<pad>"],
        ("STOP", "TO", "OPS", "aba", "b", "你", "你S", "P你", "😀", "你你", "ab你ST", "x", " S", R, R + "S", "a" + R),
    ),
    "bytes": (
        byte_level,
        [*(bytes([b]) for b in b"abSTOP \xff\xef\xbf\xbd" + YOU + SMILE + "é".encode()), YOU, SMILE, "<pad>"],
        ("STOP", "TO", "OPS", "aba", "b", "你", "你S", "P你", "😀", "é", "你你", "ab你", R, R + "S"),
    ),
    "byte fallback": (
        sentencepiece,
        [
            *"▁wordST.",
            "▁▁",
            "▁word",
            "word",
            "▁w",
            R,
            *(bytes([b]) for b in YOU + SMILE + b"\xff\xef\xbf\xbdS"),
            YOU,
            "</s>",
        ],
        (
            "word",
            " word",
            "S",
            "ST",
            "你",
            "你S",
            "S你",
            "w你",
            "😀",
            "你你",
            "  ",
            " w",
            "d ",
            "d.",
            "ord w",
        ),
    ),
    "byte fallback, no space dropped": (
        lambda: sentencepiece("never"),
        ["▁", "▁word", "word", "T", *(bytes([b]) for b in YOU + b"\xff"), YOU, "</s>"],
        ("word", " word", "你", "你T", "T你", "  ", "你你你", "word word"),
    ),
}


@st.composite
def situations(draw: st.DrawFn, pool: str) -> tuple[list[int], tuple[str, ...], list[int], int]:
    make, names, stops = POOLS[pool]
    drawn = draw(st.lists(st.sampled_from(names), max_size=MOST))
    chosen = draw(st.lists(st.sampled_from(stops), min_size=1, max_size=3))
    blocks = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    return tokens_of(make(), drawn), tuple(chosen), blocks, draw(st.sampled_from([0, 0, 1, 2, 4, 8]))


def tokens_of(wording: Wording, names: list[bytes | str]) -> list[int]:
    """Bytes that have a token of their own are that token."""
    whole = wording is merged()
    return [i for name in names for i in ([token(name)] if whole and isinstance(name, bytes) else ids(wording, name))]


@pytest.mark.parametrize("pool", POOLS)
@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_tokens_in_any_blocks_are_cut_where_a_full_reading_cuts_them(pool: str, data: st.DataObject) -> None:
    tokens, stops, blocks, at_least = data.draw(situations(pool))
    wording = POOLS[pool][0]()
    expected = naive(stops, wording, tokens, at_least)
    for lengths in (blocks, [1], [max(1, len(tokens))]):
        assert watched(stops, wording.raw, tokens, lengths, at_least) == expected


@pytest.mark.parametrize("pool", POOLS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_runs_of_bytes_are_read_right_where_windows_are_shortened_early(pool: str, data: st.DataObject) -> None:
    make, names, stops = POOLS[pool]
    units = st.lists(st.sampled_from([name for name in names if isinstance(name, bytes)]), min_size=1, max_size=2)
    runs = data.draw(st.lists(st.tuples(units, st.integers(1, 12)), min_size=1, max_size=4))
    drawn = [name for unit, times in runs for name in [*unit * times, data.draw(st.sampled_from(names))]]
    tokens, chosen = tokens_of(make(), drawn)[:60], tuple(data.draw(st.lists(st.sampled_from(stops), min_size=1)))[:3]
    at_least = data.draw(st.sampled_from([0, 5, 15, 25]))
    expected = naive(chosen, make(), tokens, at_least)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping, "GARBAGE", stopping.RESYNC + 1)
        for lengths in ([1], data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))):
            assert watched(chosen, make().raw, tokens, lengths, at_least) == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    text=st.text(st.sampled_from("ab你é😀 \n"), max_size=40),
    stop=st.text(st.sampled_from("ab你é😀 \n"), min_size=1, max_size=4),
    blocks=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_proper_text_is_cut_where_the_stop_string_is_found_in_it(text: str, stop: str, blocks: list[int]) -> None:
    wording = byte_level()
    tokens = wording.tokenizer.encode(text, add_special_tokens=False)
    at = text.find(stop)
    expected = None if at < 0 else Cut(len(text[:at].encode()), text[:at])
    assert watched((stop,), wording.raw, tokens, blocks) == expected


# ------------------------------------------------------------------------------------------------- long outputs


def garbage(pool: str, spoiled: bytes, then: bytes | str) -> list[int]:
    wording = POOLS[pool][0]()
    return [*ids(wording, b"S", YOU), *ids(wording, spoiled) * 130, *ids(wording, then)]


@pytest.mark.parametrize("spoiled", [b"\xff", YOU[:1], YOU[2:], YOU[:1] + b"\xff", YOU[1:] + b"\xff", SMILE[:3]])
@pytest.mark.parametrize("pool", POOLS)
def test_a_stop_string_behind_long_garbage_is_found_and_none_inside(pool: str, spoiled: bytes) -> None:
    wording = POOLS[pool][0]()
    for tail in (b"T" + YOU + b"TST", YOU + b"ST", YOU[2:] + b"T" + YOU + b"T"):
        tokens = garbage(pool, spoiled, tail)
        if wording.tokenizer.vocab_size < 300:
            tokens += ids(wording, "S" if "S" in wording.tokenizer.get_vocab() else b"S", YOU, b"T")
        for stops in (("T",), ("你S", "T你")):
            # The reference reads everything at once: what is completed by the first tokens is found by the pools above.
            first = next(n for n in range(1, len(tokens)) if wording.raw(tokens[:n]).endswith(R * 30))
            expected = last_part(stops, wording, tokens, first)
            for blocks in ([1], [7]):
                assert watched(stops, wording.raw, tokens, blocks, first) == expected
            assert expected is not None or len(stops) == 2


def last_part(stops: tuple[str, ...], wording: Wording, tokens: list[int], at_least: int) -> Cut | None:
    """`naive` for what is completed behind long garbage, where it alone would take long."""
    for position in range(len(tokens) - 16, len(tokens) + 1):
        written = characters(wording, tokens[:position])
        text = "".join(character for character, _ in written).rstrip(R)
        after = text.rfind(R) + 1
        places = [(text.find(s, after) + len(s), text.find(s, after)) for s in stops if after and s in text[after:]]
        if places:
            begin = min(places)[1]
            return Cut(written[begin][1], text[:begin].rstrip(R))
    return None


def longest_reading(wording: Wording, tokens: list[int], blocks: list[int]) -> int:
    lengths = [0]

    def raw(part: list[int]) -> str:
        lengths.append(len(part))
        return wording.raw(part)

    assert watched(("never", "你 never"), raw, tokens, blocks) is None
    return max(lengths)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("part", ["text", "special", "garbage", "bytes"])
def test_no_reading_grows_with_the_output(pool: str, part: str) -> None:
    wording = POOLS[pool][0]()
    repeated = {"text": [b"S", YOU], "special": ["<pad>", b"S"], "garbage": [b"\xff"], "bytes": [YOU, SMILE]}[part]
    if pool.startswith("byte fallback"):
        repeated = ["</s>" if name == "<pad>" else name for name in repeated]
    tokens = ids(wording, "T" if pool.startswith("byte fallback") else b"T", *repeated * 300)
    for blocks in ([1], [5], [3, 1]):
        assert longest_reading(wording, tokens, blocks) < 150


# ------------------------------------------------------------------------------------------------- planted bugs

BUGS = {
    "looks at the new tokens alone": ("window = [*self._window, *fresh]", "window = [*fresh]"),
    "looks at each token alone": ("self._window.append(token)", "self._window = [token]"),
    "keeps no text before the window": ("self._past = (self._past + text)[: -len(shorter)]", 'self._past = ""'),
    "keeps too few characters before it": ("default=1) - 1", "default=3) - 3"),
    "cuts the tokens at the stop string's end": ("<= kept)", "<= kept + 4)"),
    "keeps the token that holds its first bytes": (
        "len(self._raw(tokens[:n]))",
        'len(self._raw(tokens[:n]).rstrip("\\ufffd"))',
    ),
    "keeps the text of kept tokens only": ("text[:kept].rstrip", "self._raw(tokens[:before]).rstrip"),
    "keeps replacement characters before it": ("text[:kept].rstrip(UNFINISHED)", "text[:kept]"),
    "takes the first of the list": ("min(hits)[1]", "hits[0][1]"),
    "takes the one that begins first": ("min(hits)[1]", "min(hit[1] for hit in hits)"),
    "counts what is completed too early": ("and position > self._at_least", ""),
    "is off by one in at_least": ("position > self._at_least", "position >= self._at_least"),
    "counts again what was completed too early": ("_common(self._known, stripped)", "0"),
    "misses one that overlaps an earlier one": ("looked_at - len(stop) + 1)", "looked_at)"),
    "looks at the end of a block only": ("if UNFINISHED in text or", "if"),
    "begins a window with tokens that write nothing": ("if shorter and text", "if text"),
    "begins a window at any token": ("if text == stripped:", "if True:"),
    "takes unfinished bytes for text": (
        "stripped = text.rstrip(UNFINISHED)\n        whole",
        "stripped = text\n        whole",
    ),
    "forgets text that was taken back": ("if not self._known.startswith(stripped):", "if True:"),
    "counts replacement characters in a window": ("not any(UNFINISHED in stop for stop in self._stops)", "True"),
}


def planted(bug: str) -> Watch:
    source, (good, bad) = inspect.getsource(stopping), BUGS[bug]
    assert source.count(good) == 1, bug
    module = ModuleType("planted")
    module.__dict__["__name__"] = stopping.__name__
    exec(source.replace(good, bad), module.__dict__)
    return module.StopWatch


def disagreements(watch: Watch) -> set[str]:
    """Names of the contract's cases, and of pools with random tokens, where a watch is wrong or fails."""
    found = set()
    for name, (tokens, stops, at_least, expected) in contract().items():
        for blocks in ([1], [2], [3], [5], [len(tokens)]):
            if answer(watch, stops, merged(), tokens, blocks, at_least) != answer_of(expected):
                found.add(name)
    wording = sentencepiece()
    for tokens, stops, at_least in (
        (ids(wording, "T", YOU, YOU), ("你",), 4),
        (ids(wording, "T", YOU, b"\xff", "T"), ("你",), 0),
        (ids(wording, "T", "▁word", "▁word", "▁word"), ("word word",), 0),
        (ids(wording, YOU, YOU[:2], YOU[2:], "T"), ("你T",), 0),
        (ids(wording, "T", "T", "</s>", "</s>", "▁word"), (" word", "TT word"), 2),
    ):
        for blocks in ([1], [2], [5]):
            if answer(watch, stops, wording, tokens, blocks, at_least) != answer_of(
                naive(stops, wording, tokens, at_least)
            ):
                found.add("byte fallback")
    return found


def answer(
    watch: Watch, stops: tuple[str, ...], wording: Wording, tokens: list[int], blocks: list[int], least: int
) -> str:
    try:
        return answer_of(watched(stops, wording.raw, tokens, blocks, least, watch))
    except (StopIteration, IndexError, ValueError) as error:
        return repr(error)


def answer_of(cut: Cut | None) -> str:
    return repr(cut)


def test_the_watch_itself_agrees_with_all_cases() -> None:
    assert disagreements(StopWatch) == set()


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert disagreements(planted(bug))
