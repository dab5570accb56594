"""`python -m jobs COMMAND …`, and the console script `nightdesk`."""

from jobs.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
