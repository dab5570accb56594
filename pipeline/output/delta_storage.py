"""How delta-rs gets at the place of an output, and what it says when it can't: on one line, without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from pipeline.errors import OutputError, StoreError

SHOWN_CHARACTERS = 300  # of a message
S3 = ("s3", "s3a")


class Storage:
    """How delta-rs gets at the place of an output. Credentials are asked for anew each time, and never kept."""

    def __init__(self, location: str) -> None:
        scheme = urlsplit(location).scheme if "://" in location else ""
        if scheme not in ("", *S3):
            raise OutputError(
                f"output.format: delta is written to local folders and s3://, not to {scheme}://; "
                "give another output.path, or use output.format: parquet"
            )
        self.is_local = not scheme
        if self.is_local and unquote(location) != location:
            raise OutputError(
                f"output.path: Delta reads %-signs in {location} as encoded characters; give a path without, "
                "or use output.format: parquet"
            )

    def options(self) -> dict[str, str] | None:
        """Options of delta-rs; None for a local folder."""
        if self.is_local:
            return None
        from botocore.exceptions import BotoCoreError

        try:
            return _s3_options()
        except BotoCoreError as error:  # its message may hold what a credential process printed
            raise StoreError(
                f"output.path: there are no credentials for S3 ({type(error).__name__}); "
                "mend the profile or the environment (AWS_…) and run the same command again"
            ) from None


def _s3_options() -> dict[str, str]:
    """Region, endpoint and credentials as botocore finds them: environment, profiles, processes, roles.

    A session of its own each time, because one that is kept would not see that a file was rewritten.
    """
    from botocore.config import Config
    from botocore.session import get_session

    session = get_session()
    endpoint = session.create_client("s3").meta.endpoint_url
    usual = session.create_client("s3", config=Config(ignore_configured_endpoint_urls=True)).meta.endpoint_url
    options = {"AWS_REGION": session.get_config_variable("region") or "us-east-1", **_PATIENCE}
    if endpoint != usual:
        options |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": str(endpoint.startswith("http://")).lower()}
    credentials = session.get_credentials()
    if credentials is None:
        return options | {"AWS_SKIP_SIGNATURE": "true"}
    frozen = credentials.get_frozen_credentials()
    options |= {"AWS_ACCESS_KEY_ID": frozen.access_key, "AWS_SECRET_ACCESS_KEY": frozen.secret_key}
    if frozen.token:
        options["AWS_SESSION_TOKEN"] = frozen.token
    return options


_PATIENCE = {"max_retries": "8", "retry_timeout": "60s"}
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_SIGNED = re.compile(r"(?i)((?:x-amz-[a-z-]+|signature|awsaccesskeyid)(?:=|: ?))[^&\s<,]+")
_XML = re.compile(r"(?s)<(\?xml|Error>).*(</Error>|$)")


def said(error: Exception | None, options: Mapping[str, str] | None) -> str:
    """What the storage said, on one line of bounded length and without secrets."""
    text = " ".join(_COLOURS.sub("", str(error)).split())
    for key in _SECRETS:
        secret = (options or {}).get(key)
        if secret:
            text = text.replace(secret, "***")
    text = _SIGNED.sub(r"\1***", _XML.sub(_code, text))
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[: SHOWN_CHARACTERS // 2 - 1]}…{text[-SHOWN_CHARACTERS // 2 :]}"  # the cause comes last


def _code(answer: re.Match[str]) -> str:
    """Of an answer of S3 only what kind of error it is: the rest may quote the request."""
    found = re.search(r"<Code>(\w+)</Code>", answer[0])
    return found[1] if found else "no error code"
