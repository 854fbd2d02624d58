"""`steersman status`: a summary of the running process."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Sequence

from steersman import __version__
from steersman.cli.command import Command


def _main(argv: Sequence[str]) -> int:
    from steersman.config import parse_command_line  # noqa: PLC0415
    from steersman.operate.answer import QuestionError  # noqa: PLC0415
    from steersman.run.state import status_text  # noqa: PLC0415

    parsed = parse_command_line(argv)
    if parsed.version:
        print(f"steersman {__version__}")
        return 0
    address = parsed.config.metrics_bind_address
    if not address:
        raise QuestionError("the metrics server is disabled, so there is no status to show")
    # Never through an HTTP proxy.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{address}/state", timeout=10) as reply:
            document = json.load(reply)
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        raise QuestionError(
            f"no answer from {address} ({error}); is steersman running here? "
            "Its address is --metrics-bind-address"
        ) from error
    print(status_text(document, time.time()))
    return 0


COMMAND = Command(name="status", summary="show a summary of the running process", main=_main)
