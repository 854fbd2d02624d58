"""Doctor in each mode: a healthy node, a firewall where its packets pass, no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lab.faulty_node import ENDS, VIP, FaultyNode, Object

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

WAYS = {
    "nftables": ("nftables", ()),
    "iptables-nft": ("iptables", ("--iptables-variant=nft",)),
    "iptables-legacy": ("iptables", ("--iptables-variant=legacy",)),
    "userspace": ("userspace", ("--userspace-portals=iptables",)),
    "userspace-nft": ("userspace", ("--userspace-portals=nftables",)),
}
DROPPING = """chain any {
  type filter hook %s priority 0; policy accept;
  ip daddr { %s } tcp dport { 80, 8080 } drop
}"""


def of(results: list[Object], check: str) -> list[Object]:
    return [each for each in results if each["check"] == check]


@pytest.mark.parametrize("way", WAYS)
def test_doctor_knows_every_mode(way: str, tmp_path: Path) -> None:
    mode, flags = WAYS[way]
    with FaultyNode(tmp_path, mode, *flags) as node:
        # A healthy node: the rules that the process wrote are those that doctor expects.
        found = node.doctor("shop/web")
        bad = [each for each in found.results if each["verdict"] == "error"]
        assert (found.status, bad) == (0, [])
        (rules,) = of(found.results, "rules")
        assert rules["verdict"] == "ok", rules
        (firewall,) = of(found.results, "firewall")
        assert firewall["verdict"] == "ok", firewall
        whole = node.doctor()
        assert (whole.status, of(whole.results, "rules")[0]["verdict"]) == (0, "ok")

        # A firewall at the hook that the packets of this mode pass.
        hook = "input" if mode == "userspace" else "forward"
        with node.rules("", DROPPING % (hook, ", ".join((VIP, *ENDS)))):
            found = node.doctor("shop/web")
        (firewall,) = of(found.results, "firewall")
        assert firewall["verdict"] == "error", firewall
        assert "table inet other, chain any" in firewall["text"]

        # Without a process, nobody updates the rules.
        node.stop()
        found = node.doctor()
        assert found.status == 1
        assert found.cause == "no steersman runs on this node, so nobody updates its rules"
