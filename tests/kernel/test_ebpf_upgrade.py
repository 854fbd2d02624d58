"""An upgrade of the ebpf mode with other maps: connections that packets carry live on."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import hatch_build
from steersman.host.libbpf import ObjectError
from steersman.model.errors import ApplyError
from steersman.model.plan import Endpoint
from steersman.modes.base import release
from steersman.modes.ebpf import bpf, datapath, layout, loader, migration
from steersman.modes.ebpf.bpf import ArrayMap, HashMap
from steersman.modes.ebpf.dump import open_tables
from tests.support.builders.ebpf_node_plan import (
    CLIENT,
    LAYOUT,
    NODE,
    NODE_PORT,
    POD,
    STICKY,
    VIP,
    bring,
    node_plan,
)
from tests.support.lab import ebpf
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import WAIT, Node, replace_programs

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not shutil.which("clang"), reason="an older version is compiled by clang"),
]
TARGET = hatch_build.TARGETS["el" if sys.byteorder == "little" else "eb"]
PLAN = node_plan((Endpoint(POD, 8091, True),))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An object with smaller maps, whose flows and affinities have their fields turned around.

    Its marks have one more.
    """
    place = tmp_path_factory.mktemp("older")
    for path in (ebpf.compiled().parent / "c").iterdir():
        text = path.read_text().replace("131072", "65536")
        if path.name == "structs.h":
            text = re.sub(r"(struct (?:flow|affinity) \{\n)(.*?)(?=\};)", turned, text, flags=re.S)
            text = text.replace(
                "places[1 << PRESENCE_BITS];", "places[1 << PRESENCE_BITS];\n__u64 gone;"
            )
        (place / path.name).write_text(text)
    hatch_build.compile_object(place / "steersman.bpf.c", TARGET, place / "older.o")
    return place / "older.o"


def turned(found: re.Match[str]) -> str:
    more = [] if "flow" in found[1] else ["\t__u64 gone;"]  # the programs' stack is nearly full
    return "\n".join([found[1].rstrip(), *reversed(found[2].splitlines()), *more, ""])


@pytest.fixture
def node(older: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node that an older version has left."""
    with Lab(LAYOUT) as lab:
        for pod in LAYOUT.pods:
            lab.serve(pod.address, 8080, "TCP")
        made = Node(lab)
        options, made.options = made.options, msgspec.structs.replace(made.options, file=older)
        with monkeypatch.context() as patched:
            patched.setattr(loader, "differences", lambda *_: ())
            asyncio.run(bring(made.mode(), PLAN))
        made.options = options
        yield made
        made.close()


@contextmanager
def connection(node: Node) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from outside, masqueraded: both its ends."""
    with (
        node.lab.netns(POD).socket(POD, "TCP") as server,
        node.lab.netns(CLIENT).socket(VIP, "TCP") as client,
    ):
        server.bind((POD, 8091))
        server.listen()
        client.settimeout(WAIT)
        client.connect((NODE, NODE_PORT))
        accepted, (seen, _) = server.accept()
        assert seen in node.lab.node_addresses
        with accepted:
            accepted.settimeout(WAIT)
            yield client, accepted


def talk(ends: tuple[socket.socket, socket.socket]) -> None:
    for one, other in (ends, ends[::-1]):
        one.sendall(b"ping")
        assert other.recv(4) == b"ping"


def shapes(node: Node) -> set[tuple[int, int]]:
    maps = [HashMap.pinned(node.pins / "maps" / name) for name in ("flows", "services")]
    out = {(each.value_size, each.capacity) for each in maps}
    for each in maps:
        each.close()
    return out


def test_connections_and_affinity_live_on(node: Node) -> None:
    asyncio.run(bring(node.modes[-1], node_plan()))
    first = node.lab.probe(CLIENT, STICKY, 80).endpoint
    asyncio.run(bring(node.modes[-1], PLAN))
    before = shapes(node)
    with connection(node) as ends:
        talk(ends)
        asyncio.run(release(node.modes[-1]))
        asyncio.run(bring(node.mode(), PLAN))
        talk(ends)
        assert shapes(node) != before
        asyncio.run(release(node.modes[-1]))
        asyncio.run(bring(node.mode(), node_plan()))
        talk(ends)
    assert {path.name for path in node.pins.iterdir()} == {"maps", "links"}
    assert {node.lab.probe(CLIENT, STICKY, 80).endpoint for _ in range(6)} == {first}


def test_what_begins_while_it_is_under_way_lives_on(node: Node) -> None:
    asyncio.run(release(node.modes[-1]))
    mode = node.mode()
    asyncio.run(mode.worker.do(mode.read))
    assert (node.pins / "maps-next").exists()
    with connection(node) as ends:
        talk(ends)
        asyncio.run(bring(node.modes[-1], PLAN))
        talk(ends)


def test_what_an_older_version_has_not_marked_lives_on(node: Node) -> None:
    asyncio.run(bring(node.modes[-1], PLAN))
    with connection(node) as ends:
        marks = ArrayMap.pinned(node.pins / "maps" / "marks")
        marks.write(0, b"\1" + bytes(marks.value_size - 1))  # of a newer one, before that
        marks.close()
        replace_programs(node)
        talk(ends)


@pytest.mark.parametrize("shape", ["other", "same"])
def test_a_map_of_another_version_goes(node: Node, shape: str) -> None:
    if shape == "same":
        asyncio.run(release(node.modes[-1]))
        asyncio.run(bring(node.mode(), PLAN))
    marks = ArrayMap.pinned(node.pins / "maps" / "marks")
    marks.pin(node.pins / "maps" / "unknown")
    marks.close()
    asyncio.run(release(node.modes[-1]))
    with connection(node) as ends:
        asyncio.run(bring(node.mode(), PLAN))
        talk(ends)
    assert "unknown" not in {path.name for path in (node.pins / "maps").iterdir()}


def test_maps_of_an_older_version_are_a_sentence(node: Node) -> None:
    (node.pins / "maps" / "devices").unlink()
    with pytest.raises(ObjectError, match="those of another version: there is no map 'devices'"):
        open_tables(node.pins / "maps")
    asyncio.run(release(node.modes[-1]))
    asyncio.run(bring(node.mode(), PLAN))  # which has all of them again
    assert open_tables(node.pins / "maps").read()


def trusted(node: Node, maps: str) -> int:
    """Whether programs rely on the marks in a directory of pins."""
    marks = ArrayMap.pinned(node.pins / maps / "marks")
    told = marks.memory[layout.OFFSETS["marks"]["trusted"]]
    marks.close()
    return told


def test_no_program_trusts_what_others_do_not_mark(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trusted(node, "maps") == 1
    seen = []

    def wait_for_programs() -> None:
        seen.append([trusted(node, maps) for maps in ("maps", "maps-old")])
        bpf.wait_for_programs()

    monkeypatch.setattr(migration.Migration, "finish", lambda _: None)
    monkeypatch.setattr(datapath, "wait_for_programs", wait_for_programs)
    asyncio.run(release(node.modes[-1]))
    asyncio.run(bring(node.mode(), PLAN))
    assert seen == [[0, 0]]
    assert trusted(node, "maps") == 1


@pytest.mark.parametrize("step", ["copy", "switch", "finish"])
def test_it_may_be_killed_at_any_step(
    node: Node, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise OSError("killed")

    with connection(node) as ends:
        talk(ends)
        asyncio.run(release(node.modes[-1]))
        with monkeypatch.context() as patched:
            patched.setattr(migration.Migration, step, die)
            with pytest.raises(ApplyError):
                asyncio.run(bring(node.mode(), PLAN))
        talk(ends)
        asyncio.run(release(node.modes[-1]))
        asyncio.run(bring(node.mode(), PLAN))
        talk(ends)
    assert {path.name for path in node.pins.iterdir()} == {"maps", "links"}
