"""`steersman` whose doctor gives its checks a minute, as a machine under load needs.

For how long the checks listen, dial and count stays as it is.
"""

from __future__ import annotations

import sys

from steersman.cli.main import main
from steersman.operate.doctor import CHECKS, ask

PATIENCE = 60.0

if __name__ == "__main__":
    checks = [each._replace(seconds=PATIENCE) for each in CHECKS]
    vars(ask).update(CHECKS=checks)
    sys.exit(main(sys.argv[1:]))
