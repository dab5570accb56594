"""What is removed from a text before a model sees it, and nothing else.

Removed or replaced: byte-order marks, NUL and other control characters, lone surrogates (as U+FFFD), CRLF and CR
line ends, Unicode that is not in form NFC, white space at the end of lines and of the text. Markup is not touched.
"""

from __future__ import annotations

import re
import unicodedata

CLEANING_VERSION = 1
"""Part of the answer fingerprint: raise it whenever `clean` gives another text for some input."""

_LINE_BREAKS = re.compile("\r\n|[\r\x0b\x0c\x85]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff]")
_LINE_ENDS = re.compile("[ \t\u00a0]+\n")
_SUSPECT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ud800-\udfff]|[ \t\u00a0]\n")


def clean(text: str) -> str:
    """The text without what no reader can see; cleaning it again changes nothing."""
    if _SUSPECT.search(text):
        text = _CONTROLS.sub("", _LINE_BREAKS.sub("\n", whole(text)))
        text = _LINE_ENDS.sub("\n", text)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return text.rstrip()


def whole(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates as U+FFFD, so that it can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
