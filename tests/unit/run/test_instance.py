"""Who an instance is, as the kernel keeps it; tests/kernel/test_instance.py has the lock itself."""

from __future__ import annotations

import asyncio
import socket

from hypothesis import given
from hypothesis import strategies as st

from steersman.run.process.instance import Holder, Instance

WORDS = st.text(st.characters(categories=("L", "N", "P"), codec="ascii"), min_size=1, max_size=60)


@given(st.integers(1, 2**22), WORDS, WORDS, st.integers(0, 2**32), WORDS)
def test_what_is_written_is_read_back(
    pid: int, host: str, mode: str, since: int, door: str
) -> None:
    holder = Holder(pid, host, mode, since, door)
    assert Holder.of(holder.comment) == holder


@given(st.text())
def test_whatever_others_wrote_can_be_shown(comment: str) -> None:
    assert str(Holder.of(comment)).startswith("pid ")


@given(st.integers(0, 10**30))
def test_any_number_can_be_shown(number: int) -> None:
    assert str(Holder.of(f"pid={number} since={number}")).startswith("pid ")


def test_what_the_comment_says_is_read_back_whatever_it_is() -> None:
    known = Holder(17, "node-a", "nftables", 1_700_000_000, "steersman-instance")
    assert Holder.of(known.comment) == known
    assert Holder.of("pid=x since=9²") == Holder(0, "?", "?", 0)
    assert str(known) == "pid 17 on host node-a, nftables mode, since 2023-11-14T22:13:20Z"
    assert len(Holder(1, "h" * 400, "m", 0).comment) == 254


class Crowd:
    """A listening socket at which somebody waits whenever it is asked."""

    def __init__(self) -> None:
        self.accepted = 0

    def fileno(self) -> int:
        return 99_999  # of no reader

    def accept(self) -> tuple[socket.socket, str]:
        self.accepted += 1
        assert self.accepted < 1000
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours, ""


async def test_a_crowd_at_the_lock_does_not_hold_the_event_loop() -> None:
    instance, crowd = Instance("nftables", "node-a", take_over=False), Crowd()
    instance._door = crowd  # type: ignore[assignment]
    instance.newcomer = asyncio.get_running_loop().create_future()
    instance._on_connection()
    assert crowd.accepted == 256
    assert not instance.newcomer.done()
    instance._door = None  # it would listen again in a moment
    await asyncio.sleep(0)
