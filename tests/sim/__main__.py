"""`python -m tests.sim`: run seeds, replay one; see `tests.sim`."""

from __future__ import annotations

from tests.sim import clocks

clocks.replace()

from tests.sim.seeds import main  # noqa: E402 - the clocks first

if __name__ == "__main__":
    raise SystemExit(main())
