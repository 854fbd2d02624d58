"""The answer of `steersman drift`, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from steersman.cli.output import plain_lines
from steersman.model.drift import Drift, DriftState, Writer
from steersman.operate.client import Client
from steersman.operate.drift import DriftAnswer, find_drift

NOW = 1_700_000_000.0
NFT = Writer("nft", 77, "bash, pid 70", NOW)


class Process(Client):
    """A running process that gives the same answer every time."""

    def __init__(self, state: DriftState) -> None:
        super().__init__()
        self.state = state
        self.asked = ""

    def get(self, path: str) -> bytes:
        self.asked = path
        return msgspec.json.encode(self.state)


def text(answer: DriftAnswer, wide: bool = False) -> str:
    return "\n".join(plain_lines(answer.blocks(wide)))


async def ask(
    differs: Drift | None = None, repairs: Sequence[Drift] = (), fight: str = ""
) -> DriftAnswer:
    state = DriftState("memory", NOW, NOW - 60, 12, differs, tuple(repairs), len(repairs), fight)
    return await find_drift(Process(state))


async def test_nothing_differs() -> None:
    answer = await ask()
    assert answer.exit_code == 0
    assert "the kernel has all 12 objects as the process wrote them" in text(answer)
    assert "no change by another program was found since" in text(answer)


async def test_what_differs_now_is_shown_and_bad_news() -> None:
    answer = await ask(Drift(NOW, missing=3, examples=("+ one", "+ two")))
    assert answer.exit_code == 1
    lines = text(answer).splitlines()
    assert lines[0] == "3 kernel objects (3 missing) differ from what the process wrote"
    assert lines[1:4] == ["  + one", "  + two", "  and 1 more objects; --lines shows more"]


async def test_repairs_are_listed_newest_first_and_are_no_bad_news() -> None:
    old = Drift(NOW - 50, changed=1, repaired_at=NOW - 49)
    new = Drift(NOW - 5, missing=1, examples=("+ x",), writers=(NFT,), repaired_at=NOW - 4.75)
    answer = await ask(repairs=(old, new))
    assert answer.exit_code == 0
    rows = [line for line in text(answer).splitlines() if " s" in line[-3:]]
    assert "1 kernel object (1 missing)" in rows[0]
    assert "nft (pid 77, started by bash, pid 70)" in rows[0]
    assert "0.250 s" in rows[0]
    assert "an unknown program" in rows[1]
    assert "+ x" not in text(answer)
    assert "+ x" in text(answer, wide=True)
    assert msgspec.to_builtins(answer.data)["state"]["repairs"][1]["writers"][0]["program"] == "nft"


async def test_a_fight_is_bad_news() -> None:
    answer = await ask(repairs=(Drift(NOW, repaired_at=NOW),), fight="they fight")
    assert answer.exit_code == 1
    assert "they fight" in text(answer)


async def test_the_process_is_asked_for_as_many_lines_as_wanted() -> None:
    process = Process(DriftState("memory"))
    await find_drift(process, lines=50)
    assert process.asked == "/drift?lines=50"
