"""Messages name what is wrong, and nobody's keys."""

from __future__ import annotations

import pytest

from pipeline.remote.secrets import HIDDEN, scrub


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("GET http://h/b?X-Amz-Credential=AKIAX/20260101&X-Amz-Signature=f00ba4&x=1", "f00ba4"),
        ("GET http://h/b?X-Amz-Credential=AKIAX/20260101&X-Amz-Signature=f00ba4&x=1", "AKIAX"),
        ("http://h/b?AWSAccessKeyId=someone&Signature=c2ln%3D&Expires=1", "someone"),
        ("http://h/b?AWSAccessKeyId=someone&Signature=c2ln%3D&Expires=1", "c2ln"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=minio/2026/us, Signature=beef01", "beef01"),
        ("<AWSAccessKeyId>minio</AWSAccessKeyId>", "minio"),
        ('custom-process printed {"SecretAccessKey": "wJalr/XUt", "SessionToken": "FwoG"}', "wJalr/XUt"),
        ('custom-process printed {"SecretAccessKey": "wJalr/XUt", "SessionToken": "FwoG"}', "FwoG"),
        ("the key ASIAIOSFODNN7EXAMPLE is disabled", "ASIAIOSFODNN7EXAMPLE"),
        ("s3://key:secret@bucket/out", "secret"),
        ("http://u:pa%40ss@proxy:3128 refuses", "pa%40ss"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in scrub(text)
    assert HIDDEN in scrub(text)


def test_credentials_of_the_environment_are_hidden_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "operator")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "operator-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "abc")
    assert scrub("operator signed with operator-secret, abc") == f"{HIDDEN} signed with {HIDDEN}, abc"


@pytest.mark.parametrize("text", ["s3://bucket/out/part: writing failed (PutObject: SlowDown)", "a: b=c d@e"])
def test_other_text_stays(text: str) -> None:
    assert scrub(text) == text
