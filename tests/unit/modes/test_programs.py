"""What keeps a program from running is a sentence, and a reason to try again."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from steersman.host.exec import Result
from steersman.model.errors import BusyError
from steersman.modes.programs import run


class Ends:
    """Runs programs that end in one way."""

    def __init__(self, how: Result | OSError) -> None:
        self._how = how

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        del argv, stdin, timeout
        if isinstance(self._how, OSError):
            raise self._how
        return self._how


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            FileNotFoundError(2, "No such file"),
            "nft is not installed; install the package nftables",
        ),
        (PermissionError(13, "nft cannot be executed: no"), "nft cannot be executed: no"),
        (OSError(errno.EMFILE, "nft cannot be started: x"), "nft cannot be started: x"),
        (TimeoutError("nft did not end within 5 s"), "nft did not end within 5 s"),
        (Result(-9, b"", b""), "nft was killed by SIGKILL"),
        (Result(-15, b"", b""), "nft was killed by SIGTERM"),
    ],
)
async def test_a_program_that_does_not_run_to_its_end(how: Result | OSError, said: str) -> None:
    with pytest.raises(BusyError) as busy:
        await run(Ends(how), ["nft", "-f", "-"], package="nftables")
    assert str(busy.value) == said


@pytest.mark.parametrize("status", [0, 1, -11])
async def test_how_a_program_ends_by_itself_is_not_judged(status: int) -> None:
    result = Result(status, b"out", b"err")
    assert await run(Ends(result), ["nft"], package="nftables") == result
