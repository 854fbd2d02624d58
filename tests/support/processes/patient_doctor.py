"""`steersman` whose doctor gives its checks a minute, as a machine under load needs.

For how long the checks listen, dial and count stays as it is.
"""

from __future__ import annotations

import sys
from functools import partial

from steersman.cli.main import main
from steersman.operate.doctor import CHECKS, ask
from steersman.operate.doctor.check import diagnose

PATIENCE = 60.0

if __name__ == "__main__":
    checks = [each._replace(seconds=PATIENCE) for each in CHECKS]
    vars(ask).update(CHECKS=checks, diagnose=partial(diagnose, longest=PATIENCE))
    sys.exit(main(sys.argv[1:]))
