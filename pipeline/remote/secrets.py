"""What must never be in a message: keys, tokens and signatures, wherever a library quotes them."""

from __future__ import annotations

import os
import re

HIDDEN = "…"
SHORTEST = 6  # of a value that is hidden wherever it occurs; shorter ones are words
ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
    "FSSPEC_S3_KEY",
    "FSSPEC_S3_SECRET",
    "FSSPEC_S3_TOKEN",
)
_NAMES = (
    r"X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token|AWSAccessKeyId|Signature|Credential|"
    r"aws_access_key_id|aws_secret_access_key|aws_session_token|AccessKeyId|SecretAccessKey|SessionToken"
)
_NAMED = re.compile(rf"""\b({_NAMES})(["']?\s*[=:>]\s*["']?)[^\s"'&<>,;)}}]+""", re.IGNORECASE)
_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")
_USER_INFO = re.compile(r"(://)[^/\s@]+@")


def scrub(text: str) -> str:
    """`text` without the credentials of the environment, and without what looks like one."""
    values = {os.environ.get(name, "") for name in ENVIRONMENT}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    text = _NAMED.sub(rf"\1\2{HIDDEN}", text)
    return _USER_INFO.sub(rf"\1{HIDDEN}@", _KEY.sub(HIDDEN, text))
