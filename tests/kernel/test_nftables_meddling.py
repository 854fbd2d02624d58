"""Others who change the ruleset while the nftables mode reads or programs it."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from socket import inet_aton
from typing import Any

import pytest

from steersman.compile.planner import Planner
from steersman.host.exec import SubprocessExec
from steersman.host.netlink import NETLINK_NETFILTER, Netlink
from steersman.host.nlmsg import Message, Request
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import Ruleset, diff
from steersman.modes.nftables.apply import KernelTables
from steersman.modes.nftables.layout import Kind, base_name, own_set_name
from steersman.modes.nftables.mode import NftablesMode, subscribe
from steersman.modes.nftables.read import learned_entries
from steersman.netfilter.nft.generations import generation
from steersman.run.sync.sync import Sync
from steersman.source.store import Store
from tests.support.builders import nftables_plans as make
from tests.support.builders import objects
from tests.support.builders.store import replace_objects
from tests.support.lab.namespace import in_namespace
from tests.support.lab.nft import elements, nft, program, render

pytestmark = pytest.mark.kernel
OTHER = "add table ip other; delete table ip other"
MEMORY = own_set_name(Kind.AFFINITY, base_name(make.key()), local=False)


class Meddler:
    """Somebody who does something at a chosen moment: before a list is read, or in its midst."""

    def __init__(self, what: str = "flush ruleset", *, amidst: bool = True) -> None:
        self.what = what
        self.amidst = amidst
        self.moment = -1
        """Before or in which list, of all that are read."""
        self.lists = 0
        self.done = False

    def connect(self) -> Netlink:
        return Meddled(self)

    def act(self) -> None:
        self.done = True
        nft(self.what)


class Meddled(Netlink):
    """A socket that is meddled with."""

    def __init__(self, meddler: Meddler) -> None:
        super().__init__(NETLINK_NETFILTER, buffer=1 << 24)
        self._meddler = meddler

    def dump(self, request: Request) -> Iterator[Message]:
        meddler = self._meddler
        now = meddler.lists == meddler.moment
        meddler.lists += 1
        if now and not meddler.amidst:
            meddler.act()
        for number, reply in enumerate(super().dump(request)):
            yield reply
            if now and meddler.amidst and not number:
                meddler.act()


class MeddledMode(NftablesMode):
    """A mode, with the socket of which is meddled."""

    def __init__(self, meddler: Meddler) -> None:
        super().__init__(SubprocessExec())
        self._meddler = meddler

    def _opened(self) -> KernelTables:
        if self._tables is None:
            self._tables = KernelTables(self._meddler.connect(), self._nft)
        return self._tables


def sync_with(mode: NftablesMode) -> Sync:
    """A sync of three Services, one of them with session affinity."""
    store = Store("here", facts=objects.FACTS)
    names = ["web", "shop", "mail"]
    sticky: dict[str, Any] = {
        "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}},
    }
    replace_objects(
        store,
        "Service",
        [
            objects.service(name, clusterIP=f"10.96.1.{n}", **(sticky if n else {}))
            for n, name in enumerate(names)
        ],
    )
    end = objects.endpoint("10.0.0.1")
    replace_objects(store, "EndpointSlice", [objects.slice_(end, name=n, owner=n) for n in names])
    return Sync(store, Planner(objects.CONFIG, mode.traits), mode)


@pytest.mark.parametrize("amidst", [False, True])
def test_a_flush_at_any_moment_fails_no_sync_and_is_healed(amidst: bool) -> None:
    """At the start of a process, where the table is there already."""

    async def body() -> None:
        assert await sync_with(NftablesMode(SubprocessExec())).run()
        counting = Meddler()
        mode = MeddledMode(counting)
        assert (await mode.worker.do(mode.probe)).usable
        last = counting.lists - 1
        for moment in (*range(1, last, 6), last):
            meddler = Meddler(amidst=amidst)
            meddler.moment = moment
            mode = MeddledMode(meddler)
            assert (await mode.worker.do(mode.probe)).usable
            sync = sync_with(mode)
            report = await sync.run()
            assert report
            assert report.result
            await sync.check()
            assert meddler.done
            assert len(elements("cluster-ips")) == 3, moment
            assert not sync.state.findings

    in_namespace(body)


def test_only_changes_by_others_wake_the_mode_up() -> None:
    async def body() -> None:
        mode = NftablesMode(SubprocessExec())
        want = await program(mode, [make.port([1, 3])])
        with subscribe(mode._opened().netlink.port) as news:
            await mode.worker.do(mode.apply, diff(want, render(mode, [make.port([1])])))
            assert news.waiting() == []
            nft("flush ruleset")
            assert news.waiting()

    in_namespace(body)


@pytest.mark.parametrize("moment", [5, 9])  # lists of the rules of either family
def test_others_do_not_disturb_the_loading_of_the_skeleton(moment: int) -> None:
    async def body() -> None:
        meddler = Meddler(OTHER)
        meddler.moment = moment
        await program(MeddledMode(meddler), [make.port()])
        assert meddler.done

    in_namespace(body)


def remember(clients: int, endpoint: str) -> None:
    """What the data path has learned."""
    known = (
        f"10.{100 + (n >> 16)}.{n >> 8 & 255}.{n & 255} timeout 3h : {endpoint} . 8080"
        for n in range(clients)
    )
    nft(f"add element ip kube-proxy {MEMORY} {{ {', '.join(known)} }}")


def listing() -> str:
    listed = subprocess.run(("nft", "list", "ruleset"), capture_output=True, text=True, check=True)
    return listed.stdout


def test_no_entry_is_missed_if_others_disturb_the_list_of_entries() -> None:
    async def body() -> None:
        meddler = Meddler(OTHER)
        mode = MeddledMode(meddler)
        want = await program(mode, [make.port([1, 3, 5], affinity=600)])
        remember(5000, "10.244.0.1")
        meddler.moment = meddler.lists  # the next list is the one of entries
        fewer = render(mode, [make.port([3, 5], affinity=600)])
        await mode.worker.do(mode.apply, diff(want, fewer))
        assert meddler.done
        assert "10.244.0.1 . 8080" not in listing()

    in_namespace(body)


@pytest.mark.parametrize("destroys", [True, False])
def test_an_endpoint_goes_with_all_its_entries_in_one_transaction(
    monkeypatch: pytest.MonkeyPatch, destroys: bool
) -> None:
    """Another one keeps clients from learning it. Before Linux 6.3 nothing can be destroyed."""

    def with_one_that_expires(*given: Any) -> dict[bytes, bytes]:
        entries = learned_entries(*given)
        key, endpoint = next(iter(entries.items()))
        return {key[:-4] + inet_aton("10.98.0.1"): endpoint, **entries}

    async def body() -> None:
        mode = NftablesMode(SubprocessExec())
        want = await program(mode, [make.port([1, 3, 5], affinity=600)])
        sender = mode._opened().sender
        sender.destroys = destroys and sender.destroys
        remember(30_000, "10.244.0.1")
        nft(f"add element ip kube-proxy {MEMORY} {{ 10.99.0.1 timeout 3h : 10.244.0.3 . 8080 }}")
        fewer = render(mode, [make.port([3, 5], affinity=600)])
        with Netlink(NETLINK_NETFILTER) as netlink:
            before = generation(netlink)
            began = time.process_time()
            await mode.worker.do(mode.apply, diff(want, fewer))
            print(f"30,000 clients: {time.process_time() - began:.3f} s of CPU")
            assert generation(netlink) - before == 2
        left = listing()
        assert "10.244.0.1 . 8080" not in left
        assert "10.99.0.1" in left
        assert await mode.worker.do(mode.read) == fewer

    monkeypatch.setattr("steersman.modes.nftables.apply.learned_entries", with_one_that_expires)
    in_namespace(body)


def test_a_command_reads_beside_a_process_that_writes_all_the_time() -> None:
    """Many chains and sets, in lists of several datagrams: some commit comes amidst each."""

    def service(number: int, pods: Sequence[int]) -> ServicePlan:
        vip = make.cluster_ip(address=f"10.96.{number >> 8}.{number & 255}")
        return make.port(pods, of=make.key(f"s{number}"), frontends=[vip], affinity=600)

    async def body() -> None:
        process = NftablesMode(SubprocessExec())
        plans = [service(number, range(1, 9)) for number in range(400)]
        want = await program(process, plans)
        versions = [process.render_service(service(0, pods), make.SETTINGS) for pods in ([1], [3])]
        moving = versions[0].keys() | versions[1].keys()
        moving |= process.render_service(plans[0], make.SETTINGS).keys()
        stays = {key: value for key, value in want.items() if key not in moving}
        ended = threading.Event()

        async def write() -> None:
            have: Ruleset = {key: value for key, value in want.items() if key in moving}
            while not ended.is_set():
                for version in versions:
                    await process.worker.do(process.apply, diff(have, version))
                    have = version

        writer = threading.Thread(target=lambda: asyncio.run(write()))
        writer.start()
        try:
            command = NftablesMode(SubprocessExec(), looks=True)
            assert (await command.worker.do(command.probe)).usable
            command.render_node(make.SETTINGS)
            # A list of elements may lack one, but hardly the same one as the next list.
            wrong = set(stays)
            disturbed = 0
            while disturbed < 3:
                found = await command.worker.do(command.read)
                disturbed += command.changes_during_read > 0
                wrong &= {key for key, value in stays.items() if found.get(key) != value}
                assert len(wrong) < len(stays) / 10
                assert found.keys() - stays.keys() <= moving
            assert not wrong
        finally:
            ended.set()
            await asyncio.to_thread(writer.join)

    in_namespace(body)


def test_reading_beside_writes_takes_no_turn_of_theirs() -> None:
    async def body() -> None:
        mode = NftablesMode(SubprocessExec())
        want = await program(mode, [make.port(range(1, 4))])
        over = threading.Event()
        writing = asyncio.create_task(mode.worker.do(over.wait, 60))
        await asyncio.sleep(0)
        found = await asyncio.wait_for(asyncio.to_thread(mode.read_beside), 60)
        over.set()
        assert await writing
        assert found == want == await mode.worker.do(mode.read)

    in_namespace(body)
