from __future__ import annotations

from collections.abc import Sequence

import pytest

from steersman.host.exec import Result
from steersman.modes.userspace.nft_portals import NftPortals


class Recorded:
    """Notes what is run."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.commands: list[list[str]] = []

    async def run(self, argv: Sequence[str], _stdin: bytes = b"", **_: object) -> Result:
        self.commands.append(list(argv))
        return self.result


@pytest.mark.parametrize(("status", "usable"), [(0, True), (1, False)])
async def test_nft_is_tried_without_reading_the_rules_of_others(status: int, usable: bool) -> None:
    """Any list of tables makes nft 1.0 read every rule and set, until nobody changes them."""
    execute = Recorded(Result(status, b"", b"Operation not permitted"))
    support = await NftPortals(execute).probe()  # type: ignore[arg-type]
    assert support.usable is usable
    assert all("Operation not permitted" in sentence for sentence in support.missing)
    assert not any("list" in command for command in execute.commands)
