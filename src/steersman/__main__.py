"""`python -m steersman`: the same as the `steersman` command."""

from steersman.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
