"""Where the commands begin: `steersman`, `kube-proxy` and `python -m steersman`.

Importing the program takes a second. As process 1 of a container it would be deaf to SIGTERM until
the loop runs, because the kernel keeps signals without a handler from process 1.
"""

from __future__ import annotations

import os
import signal


def _end_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def main() -> int:
    """Run `steersman`; return the exit status."""
    _end_on_sigterm()
    from steersman.cli import main as cli  # noqa: PLC0415 - signals are heard while it is imported

    return cli.main()


def kube_proxy() -> int:
    """Run `kube-proxy`; return the exit status."""
    _end_on_sigterm()
    from steersman.cli import main as cli  # noqa: PLC0415 - signals are heard while it is imported

    return cli.kube_proxy()


if __name__ == "__main__":
    raise SystemExit(main())
