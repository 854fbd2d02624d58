"""The commands that list, up to the list: filters of the command line, counts, names of objects."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from steersman.cli.lists import FLAGS
from steersman.cli.main import main
from steersman.config import parse_command_line
from steersman.model.stats import ConnectionStats
from steersman.model.world import Origin
from steersman.operate import lists
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client
from steersman.operate.list_rows import Filter
from steersman.operate.lists import Counter, describer, filter_of
from tests.support.builders.doctor import world_of
from tests.support.builders.objects import HTTP, KEY, NODE, endpoint, service, slice_

DEMO = str(Path(__file__).parents[3] / "demo")
PROCESS = Origin("process", "a process")


def parsed_filter(*words: str) -> Filter:
    return filter_of(parse_command_line(words, extra=FLAGS, allow_arguments=True))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], Filter()),
        (["shop"], Filter("shop")),
        (["shop/"], Filter("shop")),
        (["shop/web"], Filter("shop", "web")),
        (["-n", "shop", "web"], Filter("shop", "web")),
        (["-n", "shop"], Filter("shop")),
        (["--name", "web"], Filter("", "web")),
        (["shop", "--name", "web"], Filter("shop", "web")),
        (["--address", "010.96.0.10"], Filter(address="10.96.0.10")),
        (["--port", "80"], Filter(port=80)),
        (["--pod", "shop/web-1"], Filter(pod="shop/web-1")),
        (["--pod", "FD00::1"], Filter(pod="fd00::1")),
    ],
)
def test_arguments_and_flags_make_a_filter(words: list[str], wanted: Filter) -> None:
    assert parsed_filter(*words) == wanted


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--address", "web"], "--address web: this is not an IP address"),
        (["--port", "http"], "--port http: give a number from 1 to 65535"),
        (["--port", "0"], "--port 0"),
        (["-n", "else", "shop/web"], "contradicts --namespace or --name"),
        (["shop/web", "--name", "cart"], "contradicts --namespace or --name"),
    ],
)
def test_bad_filters_are_refused(words: list[str], says: str) -> None:
    with pytest.raises(QuestionError, match=says):
        parsed_filter(*words)


class Counting(Client):
    """A process that has one connection more each time it is asked."""

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.asked = 0
        self._counts = counts

    def get(self, path: str) -> bytes:
        assert path == "/stats"
        self.asked += 1
        stats = ConnectionStats({}, {(HTTP, "10.1.0.1:8080"): self.asked})
        return msgspec.msgpack.encode((float(self.asked), stats if self._counts else None))


def test_only_a_process_counts_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "_APART", 0.0)
    files = world_of(service())
    process = msgspec.structs.replace(files, origin=PROCESS)

    async def story() -> None:
        client = Counting()
        assert await Counter(client).samples(files, rates=True) == ()
        assert await Counter(Counting(counts=False)).samples(process, rates=True) == ()
        counter = Counter(client)
        assert [each.at for each in await counter.samples(process, rates=False)] == [1.0]
        assert [each.at for each in await counter.samples(process, rates=False)] == [1.0, 2.0]
        assert [each.at for each in await counter.samples(process, rates=True)] == [2.0, 3.0]
        counter = Counter(client)
        assert [each.at for each in await counter.samples(process, rates=True)] == [4.0, 5.0]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("mode", "place"),
    [
        ("iptables", "iptables -t nat, chain KUBE-SERVICES"),
        ("nftables", "table ip kube-proxy, map service-ips"),
        ("ipvs", "ipvs TCP 10.96.0.10:80"),
        ("ebpf", "map frontends"),
        ("userspace", "iptables -t nat, chain KUBE-PORTALS-HOST"),
    ],
)
def test_kernel_objects_are_named_in_every_mode(mode: str, place: str) -> None:
    world = world_of(service(), slice_(endpoint("10.1.0.1", NODE)), mode=mode)
    places = describer(world)(world.plan.services[KEY])
    assert place in places
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("command", ["services", "endpoints", "nodeports"])
def test_lists_of_manifests(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command, "--manifests", DEMO, "--hostname-override=node-a"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "shop/web" in out
    assert f"from the manifests in {DEMO}" in out
    assert main([*words, "shop/web", "-o", "json"]) == 0
    assert "shop/web" in json.dumps(json.loads(capsys.readouterr().out))
    assert main([*words, "shop/nobody"]) == 1
    capsys.readouterr()
    assert main([*words, "--rates"]) == 0
    assert "connections are counted by a running process only" in capsys.readouterr().out
