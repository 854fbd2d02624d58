"""The World of the running process arrives as it was sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from steersman import __version__
from steersman.compile.planner import compile_all
from steersman.model.failover import Backend, Ejection, Observation
from steersman.model.inputs import HostFacts, NodeConfig
from steersman.model.kube import KubeObject
from steersman.model.names import ObjectName, Protocol
from steersman.model.node_state import NodeState
from steersman.model.plan import Traits
from steersman.model.world import Origin, World
from steersman.operate import load
from steersman.operate.answer import QuestionError
from steersman.operate.client import Client
from steersman.operate.load import world_again, world_of_process
from steersman.operate.world_reader import decode_world
from steersman.run.pages.world_wire import LENGTH, encode_world
from steersman.source.store import Store
from tests.support.builders.store import service, slice_
from tests.support.builders.strategies import OBJECTS

CONFIG, FACTS = NodeConfig(node_name="node-a"), HostFacts("node-a", {"lo": ("127.0.0.1/8",)})
ORIGIN = Origin("process", "a test")


def sent(store: Store, version: str = __version__) -> bytes:
    snapshot = store.snapshot
    plan = compile_all(snapshot, CONFIG, FACTS, Traits())
    world = World(
        Origin("process", ""),
        snapshot,
        plan,
        "nftables",
        config=CONFIG,
        facts=FACTS,
        findings=plan.findings,
        unserved=store.unserved,
        process=NodeState(mode="nftables", version=version, pid=7),
    )
    return b"".join(encode_world(world, store.packed_slices()))


@given(st.lists(OBJECTS, max_size=8))
def test_a_world_arrives_as_it_was_sent(objects: list[KubeObject]) -> None:
    store = Store("node-a")
    for each in objects:
        store.upsert(each)
    backend = Backend("10.1.0.1", 80, Protocol.TCP)
    ejection = Ejection(backend, Observation.SILENT, since=1.0, until=2.0, strikes=1)
    store.eject(ObjectName("shop", "cart"), (ejection,))
    snapshot = store.snapshot
    world = decode_world(sent(store), ORIGIN)
    assert dict(world.snapshot.ejected) == dict(snapshot.ejected)
    assert world.plan == compile_all(snapshot, CONFIG, FACTS, Traits())
    assert dict(world.snapshot.services) == dict(snapshot.services)
    assert world.unserved == store.unserved
    assert world.process == NodeState(mode="nftables", version=__version__, pid=7)
    assert world.mode == "nftables"
    again = compile_all(world.snapshot, world.config, world.facts, Traits())
    assert again.services == world.plan.services


def test_many_objects_arrive_in_several_documents() -> None:
    store = Store()
    for number in range(500):
        address = f"10.96.{number // 250}.{number % 250 + 1}"
        store.upsert(service(f"web-{number}", clusterIP=address, clusterIPs=[address]))
        store.upsert(slice_(f"web-{number}-1", f"web-{number}"))
    world = decode_world(sent(store), ORIGIN)
    assert len(world.snapshot.services) == len(world.plan.services) == 500


async def test_another_build_of_this_version_is_said_to_be_one() -> None:
    class OtherBuild(Client):
        body = b""

        def get(self, path: str) -> bytes:
            del path
            return self.body

    store = Store()
    store.upsert(service())
    store.upsert(slice_())
    whole = sent(store)
    client = OtherBuild()
    head = whole[: LENGTH.size + LENGTH.unpack_from(whole)[0]]
    for client.body in (b"", head, whole[: len(whole) // 2], whole[:-20] + bytes(20)):
        with pytest.raises(QuestionError, match="is not understood"):
            await world_of_process(client)


async def test_some_services_are_asked_for_and_all_if_these_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    store.upsert(service())
    whole, asked = sent(store), list[str]()

    class Process(Client):
        def get(self, path: str) -> bytes:
            asked.append(path)
            if "gone" in path:
                raise QuestionError("HTTP 404")
            return whole

    monkeypatch.setattr(load, "Client", Process)
    before = replace(decode_world(whole, ORIGIN), origin=Origin("process", ""))
    again = await world_again(before, [ObjectName("shop", "web"), ObjectName("shop", "db")])
    assert again.plan.services == before.plan.services
    assert asked.pop() == "/world?service=shop%2Fweb&service=shop%2Fdb"
    assert (await world_again(before, [ObjectName("shop", "gone")])).plan == before.plan
    assert asked.pop() == "/world"
    manifests = replace(before, origin=Origin("manifests", ""))
    assert await world_again(manifests) is manifests


def test_another_version_is_said_to_be_one() -> None:
    with pytest.raises(QuestionError, match=r"steersman 9\.9, this command is"):
        decode_world(sent(Store(), version="9.9"), ORIGIN)
