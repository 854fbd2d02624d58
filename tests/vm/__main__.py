"""`python -m tests.vm COMMAND...`: run a command in the virtual machine."""

from __future__ import annotations

import argparse
import signal
import sys

from tests.vm.kernel import DEFAULT, MachineError
from tests.vm.machine import UNAVAILABLE, run


def main() -> int:
    """Run the command; its exit status is ours, or one of the machine (machine.py)."""
    parser = argparse.ArgumentParser(prog="python -m tests.vm", description=__doc__)
    parser.add_argument("--kernel", default=DEFAULT, help="Debian package of the kernel")
    parser.add_argument("--memory", default="1G")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    argv = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not argv:
        parser.error("no command")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the machine ends with us
    try:
        return run(argv, kernel=given.kernel, timeout=given.timeout, memory=given.memory)
    except MachineError as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
