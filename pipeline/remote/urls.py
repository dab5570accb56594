"""What a URL in a job file may be. Looks at its text alone."""

from __future__ import annotations

import importlib.util
import re

PACKAGES = {  # that fsspec needs to reach storage whose objects appear whole
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "oss": "ossfs",
}
SPELLINGS = {"s3a": "s3", "gcs": "gs"}
_USER_INFO = re.compile(r"[^/@]*@|(?!arn:)[^/]*:[^@]*@")  # a secret may hold slashes


def is_remote(path: str) -> bool:
    """Is this path a URL of storage elsewhere?"""
    return "://" in path and not path.startswith("file://")


def problem(url: str) -> str | None:
    """Why this URL can't be used, without what may be a secret in it; None if it can."""
    protocol, _, path = url.partition("://")
    if _USER_INFO.match(path):
        return (
            "the URL holds credentials, which would end up in plans and messages: take them out, and give them in the "
            "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in a profile"
        )
    if protocol not in PACKAGES:
        others = ", ".join(f"{name}://" for name in PACKAGES if name != "s3")
        return f"{protocol}:// is not available; use a local path or s3:// (or, with their packages, {others})"
    if importlib.util.find_spec(PACKAGES[protocol]) is None:
        return f"{protocol}:// needs the package {PACKAGES[protocol]}: pip install {PACKAGES[protocol]}"
    if not path.strip("/"):
        return f"{protocol}:// names no bucket; write {protocol}://bucket/folder"
    return None


def canonical(url: str) -> str:
    """The same place in the one spelling that plans and comparisons use."""
    protocol, _, path = url.partition("://")
    return f"{SPELLINGS.get(protocol, protocol)}://{path}"
