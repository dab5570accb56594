"""`nightdesk schema`: the JSON schema of the job file."""

from __future__ import annotations

import json

from pipeline.config import json_schema


def print_schema() -> int:
    """Print it to standard output; returns the exit code."""
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return 0
