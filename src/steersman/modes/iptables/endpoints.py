"""A ServicePort's endpoints: their chains, and the rules that choose among them (behaviour 8.2)."""

from __future__ import annotations

from steersman.model.names import Family
from steersman.model.plan import Endpoint, ServicePlan
from steersman.modes.iptables.names import MARK_MASQ, SEP
from steersman.netfilter.names import chain_hash
from steersman.netfilter.rule_text import probability

_MASK = {Family.IPV4: "255.255.255.255", Family.IPV6: ":".join(["ffff"] * 8)}


class Endpoints:
    """Writes what concerns the endpoints of one ServicePort."""

    __slots__ = ("_bits", "_comments", "_mask", "_name", "_plan", "_protocol", "_reachable")

    def __init__(self, name: str, protocol: str, plan: ServicePlan, comments: bool) -> None:
        """Take the printed name, the protocol in lower case, and whether to write comments."""
        self._name = name
        self._protocol = protocol
        self._plan = plan
        self._comments = comments
        self._bits = plan.key.family.bits
        self._mask = _MASK[plan.key.family]
        seed = name + protocol
        self._reachable = [
            (SEP + chain_hash(seed + printed), printed) for printed in map(str, plan.reachable)
        ]

    def chains(self) -> dict[str, str]:
        """Write a KUBE-SEP chain for every endpoint that can be reached."""
        protocol, bits, affinity = self._protocol, self._bits, self._plan.affinity_seconds
        comment = f' -m comment --comment "{self._name}"' if self._comments else ""
        out: dict[str, str] = {}
        for endpoint, (chain, printed) in zip(self._plan.reachable, self._reachable, strict=True):
            recent = (
                f" -m recent --set --name {chain} --mask {self._mask} --rsource" if affinity else ""
            )
            out[chain] = (
                f"-A {chain} -s {endpoint.ip}/{bits}{comment} -j {MARK_MASQ}\n"
                f"-A {chain} -p {protocol}{comment}{recent} -m {protocol}"
                f" -j DNAT --to-destination {printed}"
            )
        return out

    def choices(self, chain: str, among: tuple[Endpoint, ...]) -> list[str]:
        """Choose an endpoint: the one that the client had, else any, all equally likely."""
        endpoints = self._reachable
        if among != self._plan.reachable:
            names = dict(zip(self._plan.reachable, self._reachable, strict=True))
            endpoints = [names[endpoint] for endpoint in among]
        heads = [f"-A {chain}"] * len(endpoints)
        if self._comments:
            start = f'-A {chain} -m comment --comment "{self._name} -> '
            heads = [f'{start}{printed}"' for _, printed in endpoints]
        lines = self._affinity(heads, endpoints) if self._plan.affinity_seconds else []
        left = len(endpoints)
        for head, (target, _) in zip(heads, endpoints, strict=True):
            chance = f" -m statistic --mode random --probability {probability(left)}"
            lines.append(f"{head}{chance if left > 1 else ''} -j {target}")
            left -= 1
        return lines

    def _affinity(self, heads: list[str], endpoints: list[tuple[str, str]]) -> list[str]:
        seconds = self._plan.affinity_seconds
        return [
            f"{head} -m recent --rcheck --seconds {seconds} --reap --name {target}"
            f" --mask {self._mask} --rsource -j {target}"
            for head, (target, _) in zip(heads, endpoints, strict=True)
        ]
