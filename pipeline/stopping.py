"""Where stop strings cut a sequence: in its text at the character, in its tokens before the first that writes on it.

Knows nothing of tokenizers beyond a function from token ids to text, and nothing of EOS tokens, blocks or schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character, or none yet
GARBAGE = 64  # replacement characters at the window's end that make it worth shortening
RESYNC = 8  # of them: more than a character has bytes, so what comes behind does not depend on what was before


@dataclass(frozen=True, slots=True)
class Cut:
    """What a completion keeps: its first `tokens` generated ids, and exactly `text`."""

    tokens: int
    text: str


class StopWatch:
    """Looks for the stop strings of one sequence in what it generates.

    The answer depends on the tokens alone, not on how calls cut them into blocks: it is that of a watch which sees
    one token at a time and stops at the first after which the text holds a stop string. Of several that this token
    completes, the one that ends first counts, and of those the one that begins first. What is completed by one of
    the first `at_least` tokens never counts. A replacement character at the end of a text stands for bytes that may
    yet become another one: it is no text before something follows, and a text is not cut behind one.

    Decoding everything again for each token is quadratic, so only a window is decoded: the tokens since the last but
    one place where the text ended in a whole character. The first half of it takes what decoders do to the beginning
    of a text (drop a space), the difference is the new text. A run of byte tokens can also take text back: some
    decoders turn all of it into replacement characters once one byte is wrong. (With such a decoder, a stop string that
    begins with a replacement character may leave tokens that write on it; better refuse those.)
    """

    def __init__(self, stops: tuple[str, ...], raw: Callable[[list[int]], str], at_least: int = 0) -> None:
        """`raw`: the text of token ids, special ones left out, which may end in an unfinished character."""
        self._stops = tuple(stop for stop in dict.fromkeys(stops) if stop)
        self._raw = raw
        self._at_least = at_least
        self._reach = max(map(len, self._stops), default=1) - 1  # characters of a stop string before its last
        # Who looks for replacement characters must count them, and how many a run has is known from all of it alone.
        self._windowed = not any(UNFINISHED in stop for stop in self._stops)
        self._past = ""  # the text before the window's, as far back as a stop string reaches
        self._window: list[int] = []
        self._whole = 0  # leading tokens of the window whose text ended in a whole character
        self._known = ""  # the window's text that has been looked at, unfinished characters left out

    def look(self, tokens: list[int], new: int) -> Cut | None:
        """Where the sequence ends, if it does: `tokens` are all generated ones, the last `new` were not seen before.

        Not to be called again once it has said where.
        """
        if not self._stops or not new:
            return None
        fresh = tokens[len(tokens) - new :]
        if self._passes(fresh):
            return None
        for position, token in enumerate(fresh, len(tokens) - new + 1):
            begin = self._feed(token)
            if begin is not None and position > self._at_least:
                return self._cut(tokens[:position], begin)
        return None

    def _passes(self, fresh: list[int]) -> bool:
        """True if these tokens complete no stop string, seen at one go: all of their characters are whole."""
        window = [*self._window, *fresh]
        text = self._raw(window)
        if UNFINISHED in text or not text.startswith(self._known) or self._found(text):
            return False
        self._window, self._known = window, text
        self._slide(text)
        return True

    def _feed(self, token: int) -> int | None:
        """Take one token in. Where the stop string that it completes begins, in characters from the end of the text."""
        self._window.append(token)
        text = self._raw(self._window)
        begin = self._found(text)
        stripped = text.rstrip(UNFINISHED)
        if not self._known.startswith(stripped):  # else some of it is unfinished, again, and may come back
            self._known = stripped
        if text == stripped:
            self._slide(text)
        elif text.endswith(UNFINISHED * GARBAGE) and self._windowed:
            self._shorten()
        return begin

    def _found(self, text: str) -> int | None:
        """Looks in the part of the window's text that was not known: see `_feed`."""
        stripped = text.rstrip(UNFINISHED)
        whole, looked_at = self._past + stripped, len(self._past) + _common(self._known, stripped)
        hits = []
        for stop in self._stops:
            begin = whole.find(stop, max(0, looked_at - len(stop) + 1))
            if begin >= 0:
                hits.append((begin + len(stop), begin))
        return len(self._past) + len(text) - min(hits)[1] if hits else None

    def _slide(self, text: str) -> None:
        """The window's text ends in a whole character: drop what came before the last such place."""
        rest = self._window[self._whole :]
        shorter = self._raw(rest) if self._windowed else ""
        if shorter and text.endswith(shorter):
            self._past = (self._past + text)[: -len(shorter)]
            self._past = self._past[max(0, len(self._past) - self._reach) :]
            self._window, self._known = rest, shorter
        self._whole = len(self._window)

    def _shorten(self) -> None:
        """Where the window ends in bytes that are no character: keep where that began, and the last of them.

        After more bytes than a character has, with none ended by any token, a decoder that judges a run of bytes as
        one has judged this one; for a decoder that judges them one by one, the last few decide.
        """
        window, before, garbage = self._window, self._whole, UNFINISHED * RESYNC
        if not self._raw(window[before:]).endswith(UNFINISHED * GARBAGE):
            return  # not garbage: whole characters that the decoder shows again once the last one is complete
        ends, starts = range(before, len(window)), range(len(window) - 1, before, -1)
        head = next((n for n in ends if self._raw(window[before:n]).endswith(garbage)), len(window))
        tail = next((n for n in starts if self._raw(window[n:]).endswith(garbage)), head)
        self._past, self._window = "", window[:head] + window[max(head, tail) :]
        self._known = self._raw(self._window).rstrip(UNFINISHED)

    def _cut(self, tokens: list[int], begin: int) -> Cut:
        """`tokens` end with the one that completes the stop string."""
        text = self._raw(tokens)
        kept = len(text) - begin
        # A token that writes half of a character makes the text longer by one, as the whole of it does.
        before = next(n for n in range(len(tokens) - 1, -1, -1) if len(self._raw(tokens[:n])) <= kept)
        return Cut(before, text[:kept].rstrip(UNFINISHED))


def _common(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
