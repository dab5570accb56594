"""`python -m jobs COMMAND …`, and the console script `nightdesk`."""

import signal
import sys

from jobs.ending import USAGE_ERROR

OURS = ("jobs", "actors", "pipeline")


def main() -> int:
    """Returns the exit code. An interpreter without nightdesk's dependencies is the user's mistake, and no bug."""
    try:
        from jobs import cli
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package in OURS:
            raise
        print(
            f"nightdesk: {sys.executable} has no package {package}: install nightdesk there, or take the interpreter "
            "that has it (for a job on a cluster: submit --python)",
            file=sys.stderr,
        )
        return USAGE_ERROR
    return cli.main()


if __name__ == "__main__":
    code = main()
    for late in (signal.SIGINT, signal.SIGTERM):
        signal.signal(late, signal.SIG_IGN)  # all is closed; one more would only change the exit code
    raise SystemExit(code)
