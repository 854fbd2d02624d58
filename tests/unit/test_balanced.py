"""Counters of IPVS as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from steersman.host.exec import SubprocessExec
from steersman.model.names import Protocol
from steersman.model.plan import NodePlan
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.names import ServerKey, Target
from steersman.modes.ipvs.wire import Stats
from steersman.run.balanced import balanced
from steersman.run.metrics import Metrics
from tests.iptables_plans import SETTINGS, cluster_ip, endpoints, external_ip, key, plan

END = ("10.244.0.1", 8080)
PLAN = plan(
    key("shop/cart:http"),
    cluster_ip("10.96.0.1"),
    external_ip("192.0.2.7"),
    cluster=endpoints(END[0]),
)
WORLD = NodePlan(SETTINGS, {PLAN.key: PLAN})


class Counting(IpvsMode):
    def traffic(self, keys: Iterable[ServerKey]) -> Iterator[tuple[ServerKey, Target, Stats]]:
        assert set(keys) == {
            ServerKey(Protocol.TCP, "10.96.0.1", 80),
            ServerKey(Protocol.TCP, "192.0.2.7", 80),
        }
        for each in keys:
            yield each, END, Stats(1, 20, 300, 4000, 50000)


class Silent(IpvsMode):
    def traffic(self, keys: Iterable[ServerKey]) -> Iterator[tuple[ServerKey, Target, Stats]]:
        raise OSError("gone")


def scraped(mode: IpvsMode) -> str:
    metrics = Metrics("ipvs")
    metrics.ask(lambda: balanced(mode, lambda: WORLD))
    return metrics.render()[0].decode()


def test_an_endpoint_is_counted_over_all_addresses_of_its_service() -> None:
    text = scraped(Counting(SubprocessExec()))
    labels = 'namespace="shop",port="http",protocol="TCP",service="cart"'
    assert f'steersman_connections_total{{endpoint="10.244.0.1:8080",{labels}}} 2.0' in text
    for word, there, back in (("packets", "40.0", "600.0"), ("bytes", "8000.0", "100000.0")):
        for direction, number in (("to_endpoint", there), ("to_client", back)):
            head = f'steersman_proxied_{word}_total{{direction="{direction}",endpoint='
            (line,) = [line for line in text.splitlines() if line.startswith(head)]
            assert line.endswith(f" {number}")


def test_a_kernel_that_does_not_say_spoils_no_scrape() -> None:
    text = scraped(Silent(SubprocessExec()))
    assert "steersman_syncs_total" in text
    assert "10.244.0.1" not in text
