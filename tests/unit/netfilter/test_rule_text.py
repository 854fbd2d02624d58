# ruff: noqa: E501  (rules are one line each, as iptables has them)
"""The one spelling of rules, and what rules have in common."""

from __future__ import annotations

import pytest

from steersman.model.names import Family
from steersman.model.ruleset import Diff
from steersman.netfilter.iptables.restore import count_written
from steersman.netfilter.iptables.saved import canonical, chains

C = '-m comment --comment "ns/a:http cluster IP"'


@pytest.mark.parametrize(
    ("family", "other", "ours"),
    [
        (4, f"-A X {C} -m tcp -p tcp -d 10.96.0.1/32 --dport 80 -j Y",
            f"-A X -d 10.96.0.1/32 -p tcp {C} -m tcp --dport 80 -j Y"),
        (4, "[5:300] -A X -d 10.96.0.1 -j Y", "-A X -d 10.96.0.1/32 -j Y"),
        (6, "-A X -s fd00:0::1 -j Y", "-A X -s fd00::1/128 -j Y"),
        (6, "-A X -d ::1.2.3.4/128 -j Y", "-A X -d ::102:304/128 -j Y"),
        (4, "-A X -d 10.96.0.0/255.255.0.0 -j Y", "-A X -d 10.96.0.0/255.255.0.0 -j Y"),
        (4, "-A X -j MARK --or-mark 0x4000", "-A X -j MARK --set-xmark 0x4000/0x4000"),
        (4, "-A X -j MARK --or-mark 0x00004000", "-A X -j MARK --set-xmark 0x4000/0x4000"),
        (4, "-A X -j MARK --xor-mark 0x4000", "-A X -j MARK --set-xmark 0x4000/0x0"),
        (4, "-A X -j MARK --set-xmark 0x00004000/0x00004000", "-A X -j MARK --set-xmark 0x4000/0x4000"),
        (4, "-A X -m mark ! --mark 0x00004000/0x00004000 -j RETURN", "-A X -m mark ! --mark 0x4000/0x4000 -j RETURN"),
        (4, "-A X -m mark --mark 0x04 -j RETURN", "-A X -m mark --mark 0x4 -j RETURN"),
        (4, "-A X -m conntrack --ctstate INVALID -m nfacct --nfacct-name n -j DROP",
            "-A X -m conntrack --ctstate INVALID -m nfacct --nfacct-name  n -j DROP"),
        (4, f"-A INPUT {C} -m conntrack --ctstate NEW -j Y", f"-A INPUT -m conntrack --ctstate NEW {C} -j Y"),
        (4, f"-A X -m conntrack --ctstate NEW {C} -j Y", f"-A X {C} -m conntrack --ctstate NEW -j Y"),
        (4, "-A X -m comment --comment plain -j Y", "-A X -m comment --comment plain -j Y"),
        (4, r'-A X -m comment --comment "a \"b\"" -j Y', r'-A X -m comment --comment "a \"b\"" -j Y'),
        (4, "-A X -m recent --name K --rcheck --seconds 3 --reap -j K",
            "-A X -m recent --rcheck --seconds 3 --reap --name K --mask 255.255.255.255 --rsource -j K"),
        (6, "-A X -m recent --name K --set -j K",
            "-A X -m recent --set --name K --mask ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff --rsource -j K"),
        (4, "-A X -m recent --set --name K --mask 255.255.255.255 --rdest -j K",
            "-A X -m recent --set --rdest --name K --mask 255.255.255.255 -j K"),
        (4, "-A X -m statistic --mode random --probability 0.3333333333 -j Y",
            "-A X -m statistic --mode random --probability 0.33333333349 -j Y"),
        (4, "-A X -m statistic --mode random --probability 0.70000000019 -j Y",
            "-A X -m statistic --mode random --probability 0.70000000019 -j Y"),
        (4, "-A X -m statistic --mode random --probability 0 -j Y", "-A X -m statistic --mode random --probability 0 -j Y"),
        (4, "-A X -m statistic --mode nth --every 3 -j Y", "-A X -m statistic --mode nth --every 3 -j Y"),
        (4, "-A X -p tcp -j REJECT", "-A X -p tcp -j REJECT --reject-with icmp-port-unreachable"),
        (6, "-A X -j REJECT", "-A X -j REJECT --reject-with icmp6-port-unreachable"),
        (4, "-A X -p tcp -j DNAT --to-destination 10.0.0.1:80", "-A X -p tcp -j DNAT --to-destination 10.0.0.1:80"),
        (6, "-A X -p tcp -j DNAT --to-destination [fd00:0::1]:80", "-A X -p tcp -j DNAT --to-destination [fd00::1]:80"),
        (4, "-A X -p tcp -j DNAT --to-destination :80", "-A X -p tcp -j DNAT --to-destination :80"),
        (4, "-A X --in-interface eth0 --jump Y", "-A X -i eth0 -j Y"),
        (4, "-A X -g Y", "-A X -g Y"),
        (4, "-A X", "-A X"),
        (4, "-A", "-A"),
        (4, '-A X -m comment --comment "open', '-A X -m comment --comment "open'),
    ],
)  # fmt: skip
def test_one_spelling(family: int, other: str, ours: str) -> None:
    assert canonical(other, family) == ours
    assert canonical(ours, family) == ours


def test_a_text_that_ends_early_is_read_to_its_end() -> None:
    text = "*nat\n:X - [0:0]\n-A X -j Y\n-A X -j Z"
    assert list(chains(text)) == [
        ("nat", "X", "-", []),
        ("nat", "X", "", ["-A X -j Y", "-A X -j Z"]),
    ]


def test_a_diff_is_counted_by_what_it_writes_and_by_its_growth() -> None:
    a, b, c = ((4, "nat", chain, "") for chain in "ABC")
    change = Diff(
        added={a: "-A A -j X\n-A A -j Y"}, removed={b: "-A B -j X"}, changed={c: ("", "-A C -j X")}
    )
    written, growth = count_written(change)
    assert written == {("nat", Family.IPV4): 3}
    assert growth == {("nat", Family.IPV4): 2}
