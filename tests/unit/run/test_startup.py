"""What is done once, before the loop."""

from __future__ import annotations

import pytest

from steersman.config import parse_command_line
from steersman.run.startup import load_store


@pytest.mark.parametrize(
    ("flag", "where"),
    [
        ("--master=http://u:s3cret@127.0.0.1:1", "http://127.0.0.1:1"),
        ("--manifests=/nowhere/a,/nowhere/b", "/nowhere/a, /nowhere/b"),
    ],
)
async def test_a_source_that_is_not_there_is_named(flag: str, where: str) -> None:
    config = parse_command_line([flag, "--hostname-override=n"]).config
    with pytest.raises(TimeoutError, match=f"no Services were read from {where} in 0.05 s"):
        await load_store(config, seconds=0.05)
