"""A node with rules of other programs, for doctor's checks of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from steersman.modes.base import Requirements
from steersman.modes.iptables.names import OWN_CHAINS
from steersman.operate.doctor.context import Context, Question
from steersman.operate.trace_loss import Hop
from tests.support.builders.doctor import CART, FakeNetwork, context_of
from tests.support.builders.objects import endpoint, port, service, slice_
from tests.support.modes.memory import MemoryMode
from tests.support.modes.scripted import Scripted

THINGS = service(type="NodePort", ports=[port(nodePort=30080)]), slice_(endpoint("10.0.0.5"))
Delivery = Literal["forwarded", "local", "translated"]


class Delivering(MemoryMode):
    def __init__(self, delivery: Delivery = "forwarded") -> None:
        super().__init__()
        self.delivery = delivery

    def requirements(self) -> Requirements:
        return Requirements(delivery=self.delivery, own_jumps=OWN_CHAINS)


def saved(chains: str, *rules: str) -> str:
    return "\n".join(("*filter", *chains.split(";"), *rules, "COMMIT", ""))


ACCEPTING = ":INPUT ACCEPT [0:0];:FORWARD ACCEPT [0:0];:OUTPUT ACCEPT [0:0]"


def programs(filter_table: str, *more: tuple[str, str | int | Exception]) -> Scripted:
    return Scripted(
        *more,
        ("iptables-nft-save", filter_table),
        ("ip6tables-nft-save", ""),
    )


def context(
    runs: Scripted,
    *,
    way: Hop | None = None,
    delivery: Delivery = "forwarded",
    question: Question | None = None,
    root: Path | None = None,
    tables: Sequence[tuple[str, str]] = (),
) -> Context:
    return context_of(
        *THINGS,
        mode=Delivering(delivery),
        network=FakeNetwork(ways={"10.0.0.5": way or Hop(device="pod1")}),
        programs=runs,
        question=question or Question(CART),
        root=root,
        list_tables=lambda: list(tables),
    )
