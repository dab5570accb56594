"""`python -m jobs COMMAND …`, and the console script `nightdesk`."""

import signal

from jobs.cli import main

if __name__ == "__main__":
    code = main()
    for late in (signal.SIGINT, signal.SIGTERM):
        signal.signal(late, signal.SIG_IGN)  # all is closed; one more would only change the exit code
    raise SystemExit(code)
