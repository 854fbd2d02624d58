"""The maps are read as they were written, whatever came before; and the cost of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from random import Random

import pytest

from steersman.host.bpf_object import OpenedObject
from steersman.host.libbpf import call, library
from steersman.model.names import Family
from steersman.model.plan import ServicePlan
from steersman.model.ruleset import diff
from steersman.modes.ebpf import bpf, flows, layout, render
from steersman.modes.ebpf.bpf import ArrayMap, FullError, HashMap
from steersman.modes.ebpf.datapath import Datapath, EbpfOptions
from steersman.modes.ebpf.layout import Kind
from steersman.modes.ebpf.links import DEVICE_PROGRAMS, XDP_PROGRAM
from steersman.modes.ebpf.loader import LoadedObject, Shape
from steersman.modes.ebpf.services import QUARANTINE, SlotAllocator
from steersman.modes.ebpf.tables import Tables
from tests.support.builders import plans
from tests.support.lab.ebpf import bpffs, compiled
from tests.support.lab.ebpf_node import MARKS

pytestmark = MARKS
MARKER = (0).to_bytes(3, "big")


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedObject]:
    made = LoadedObject(compiled(), None)
    yield made
    made.close()


def ruleset(services: list[ServicePlan]) -> dict[bytes, bytes]:
    want = render.render_node(plans.SETTINGS, render.Programs(bytes(16)))
    del want[Kind.PROGRAMS.value]
    for service in services:
        want.update(render.render_service(service))
    return want


def draw(rng: Random) -> dict[bytes, bytes]:
    numbers = rng.sample(range(200), rng.randint(0, 60))
    return ruleset([plans.random_plan(rng, n, rng.choice(list(Family))) for n in numbers])


def test_a_new_map_is_what_the_object_asks_for(loaded: LoadedObject) -> None:
    with contextlib.closing(OpenedObject(compiled())) as opened:
        btf = library().bpf_object__btf(opened.handle)
        asked = {name: Shape.of_object(btf, handle) for name, handle in opened.each("map")}
    found = {name: Shape.of_map(fd) for name, fd in loaded.maps.items()}
    assert found == {name: shape for name, shape in asked.items() if ".rodata" not in name}
    assert all(found[name].value for name in ("frontends", "flows", "reached"))


def maps_of(program: int) -> list[int]:
    """Ids of the maps that a program uses."""
    ids, info = (ctypes.c_uint32 * 64)(), ctypes.create_string_buffer(64)
    struct.pack_into("=IQ", info, 52, len(ids), ctypes.addressof(ids))  # struct bpf_prog_info
    size = ctypes.c_uint32(len(info))
    call("bpf_obj_get_info_by_fd", program, info, ctypes.byref(size))
    return list(ids)


def test_all_programs_share_their_variables(loaded: LoadedObject) -> None:
    variables = bpf.Object(loaded.maps["steersma.bss"]).id
    for name in DEVICE_PROGRAMS:
        assert variables in maps_of(loaded.programs[name])


def test_a_program_that_is_left_out_is_not_loaded(loaded: LoadedObject) -> None:
    made = LoadedObject(compiled(), None, {XDP_PROGRAM})
    assert loaded.programs.keys() - made.programs.keys() == {XDP_PROGRAM}
    made.close()


def markers(tables: Tables) -> set[bytes]:
    return {key[:16] for key, _ in tables.frontends.map.items() if key[16:19] == MARKER}


def cluster_ips(want: dict[bytes, bytes]) -> set[bytes]:
    return {
        key[1:17]
        for key, value in want.items()
        if key[:1] == Kind.FRONTEND
        and layout.FRONTEND_VALUE.unpack_from(value)[1] & layout.FRONTEND_CLUSTER_IP
    }


@pytest.mark.parametrize("seed", range(8))
def test_what_is_read_is_what_was_written(loaded: LoadedObject, seed: int) -> None:
    rng = Random(seed)
    tables = Tables(loaded.maps)
    for _ in range(6):
        want = draw(rng)
        tables.write(diff(tables.read(), want))
        if rng.random() < 0.5:
            tables = Tables(loaded.maps)  # another process takes over
        assert tables.read() == want
        assert markers(tables) == cluster_ips(want)
    sticky = sum(
        len({v[n : n + 18] for n in range(8, len(v), 18)})
        for k, v in want.items()
        if k[:1] == Kind.SERVICE and (layout.ServiceValue.unpack(v).seconds or b" UDP " in k)
    )
    assert len(list(tables.services.members.items())) == sticky
    tables.write(diff(tables.read(), {}))
    services, frontends = tables.services, tables.frontends
    for empty in (
        frontends.map,
        services.names,
        services.members,
        tables.prefixes,
        tables.node_ips,
    ):
        assert list(empty.items()) == []


def test_connections_are_forgotten_by_their_state(loaded: LoadedObject) -> None:
    known = HashMap(loaded.maps["flows"])
    second, now = 10**9, 10**15
    timeouts = flows.Timeouts()
    for number, (protocol, state, limit) in enumerate(
        [
            (6, flows.OPENING, 60),
            (6, flows.ESTABLISHED, 86400),
            (6, flows.CLOSING, 120),
            (17, flows.OPENING, 30),
            (17, flows.ESTABLISHED, 120),
        ]
    ):
        for age in (limit - 1, limit + 1):
            source = bytes((number,)) * 15 + bytes((age > limit,))
            key = layout.FLOW_KEY.pack(source, bytes(16), b"\0\1", b"\0\2", protocol, 0)
            value = layout.FLOW.pack(bytes(16), now - age * second, b"\0\0", 1, state, 0)
            known.put(key, value)
    old = [
        key
        for key, value in known.items()
        if flows.expired_entries(key, value, known.get, timeouts, now)
    ]
    assert len(old) == 5
    assert all(key[15] for key in old)
    known.delete_all(old)
    assert not any(
        flows.expired_entries(key, value, known.get, timeouts, now) for key, value in known.items()
    )
    known.delete_all([key for key, _ in known.items()])


@pytest.mark.parametrize("seed", range(4))
def test_no_frontend_ever_leads_to_an_empty_pool(
    loaded: LoadedObject, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, stores = Random(seed), 0
    tables = Tables(loaded.maps)
    services, store = ArrayMap(loaded.maps["services"]), ArrayMap.store

    def looking(array: ArrayMap, index: int, field: int, value: bytes) -> None:
        nonlocal stores
        store(array, index, field, value)
        stores += 1
        assert list(dead_ends(tables, services)) == []

    monkeypatch.setattr(ArrayMap, "store", looking)
    for _ in range(6):
        numbers = rng.sample(range(8), rng.randint(0, 8))
        want = ruleset([plans.random_plan(rng, n, Family.IPV4) for n in numbers])
        tables.write(diff(tables.read(), want))
        assert tables.read() == want
    tables.write(diff(tables.read(), {}))
    assert stores


def dead_ends(tables: Tables, services: ArrayMap) -> Iterator[bytes]:
    """Frontends some of whose clients would be sent to an endpoint where there is none."""
    for key, value in tables.frontends.map.items():
        number, actions, flags = layout.FRONTEND.unpack(value)
        counts = layout.SERVICE.unpack(services.read(number))[1:4:2]
        for action in (actions >> 4 * n & 15 for n in range(3)):
            forwards = not flags & layout.FRONTEND_MARKER and not action & 3
            if forwards and not counts[bool(action & layout.ACTION_LOCAL)]:
                yield key


def test_only_what_is_used_of_an_array_is_in_memory(loaded: LoadedObject) -> None:
    array, other = (ArrayMap(loaded.maps["slots"]) for _ in range(2))
    whole = array.capacity * array.value_size
    for number in (0, 1 << 16, array.capacity - 1):
        assert len(array.memory) < whole
        record = bytes((number % 251 + 1,)) * array.value_size
        array.write(number, record)
        assert array.read(number) == other.read(number) == record
        array.store(number, 8, bytes(8))
        assert other.read(number) == record[:8] + bytes(8) + record[16:]
        array.write(number, bytes(array.value_size))


WRITES = ((HashMap, "put"), (HashMap, "put_all"), (HashMap, "delete"))
ARRAY_WRITES = ((ArrayMap, "store"), (ArrayMap, "write"))


class KilledError(Exception):
    """A process that is no more."""


def killed_after(writes: int, patch: pytest.MonkeyPatch) -> None:
    """Let some writes into maps happen, and then no more."""
    left = itertools.count(writes, -1)

    def mortal(write: Callable[..., object]) -> Callable[..., object]:
        def written(*given: object) -> object:
            if next(left) <= 0:
                raise KilledError
            return write(*given)

        return written

    for kind, name in WRITES + ARRAY_WRITES:
        patch.setattr(kind, name, mortal(getattr(kind, name)))


def reopened(loaded: LoadedObject) -> Tables:
    """Another process, for which what was given back has always rested long enough."""
    seconds = itertools.count(0, 10)
    tables = Tables(loaded.maps, lambda: next(seconds))
    tables.repair()
    return tables


def scattered(rng: Random) -> dict[bytes, bytes]:
    """Few Services, so that most are gone a moment later, and their places others'."""
    return ruleset([plans.random_plan(rng, n, Family.IPV4) for n in rng.sample(range(40), 6)])


@pytest.mark.parametrize("seed", range(4))
def test_a_process_may_be_killed_at_any_write(loaded: LoadedObject, seed: int) -> None:
    rng = Random(seed)
    for _ in range(30):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KilledError):
            tables, want = reopened(loaded), scattered(rng)
            killed_after(rng.randint(1, 60), patch)
            tables.write(diff(tables.read(), want))
        for _ in range(2):
            tables, want = reopened(loaded), scattered(rng)
            tables.write(diff(tables.read(), want))
            assert tables.read() == want
            assert markers(tables) == cluster_ips(want)
            assert reopened(loaded).read() == want
    tables.write(diff(tables.read(), {}))
    assert list(tables.services.members.items()) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_change_whose_write_failed_can_be_written_again(loaded: LoadedObject, seed: int) -> None:
    """By the same process, the whole of it: nothing of what was done is in the way."""
    rng = Random(seed)
    tables, want = reopened(loaded), scattered(rng)
    tables.write(diff(tables.read(), want))
    for _ in range(40):
        have, want = want, scattered(rng)
        change = diff(have, want)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(OSError):
            refused_once(rng.randint(1, 60), patch)
            tables.write(change)
        tables.write(change)
        assert tables.read() == want
        assert markers(tables) == cluster_ips(want)
    assert reopened(loaded).read() == want
    tables.write(diff(want, {}))
    assert list(tables.services.members.items()) == []


def refused_once(writes: int, patch: pytest.MonkeyPatch) -> None:
    """Have the kernel be without memory for a write, or an array without place, after others."""
    left = itertools.count(writes, -1)

    def refusing(write: Callable[..., object], error: OSError) -> Callable[..., object]:
        def written(*given: object) -> object:
            if next(left) == 0:
                raise error
            return write(*given)

        return written

    memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    for kind, name in WRITES:
        patch.setattr(kind, name, refusing(getattr(kind, name), memory))
    patch.setattr(SlotAllocator, "take", refusing(SlotAllocator.take, FullError("no place")))


def test_a_process_goes_on_where_there_was_no_room(
    loaded: LoadedObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, want = reopened(loaded), scattered(Random(7))
    tables.write(diff(tables.read(), {}))
    take, taken = SlotAllocator.take, itertools.count()

    def full(places: SlotAllocator, count: int) -> int:
        if next(taken) == 8:
            raise FullError
        return take(places, count)

    monkeypatch.setattr(SlotAllocator, "take", full)
    with pytest.raises(FullError):
        tables.write(diff(tables.read(), want))
    tables.write(diff(tables.read(), want))
    assert tables.read() == reopened(loaded).read() == want
    tables.write(diff(tables.read(), {}))


@pytest.mark.parametrize("name", ["node_ips", "prefixes"])
def test_a_full_map_is_named(loaded: LoadedObject, name: str) -> None:
    """The kernel calls it an argument list that is too long."""
    full = HashMap(loaded.maps[name])
    length = (160).to_bytes(4, layout.BYTE_ORDER) if name == "prefixes" else b""
    rest = full.key_size - len(length)
    keys = [length + n.to_bytes(rest, "big") for n in range(full.capacity + 1)]
    value = bytes(full.value_size)
    for key in keys[:-1]:
        full.put(key, value)
    said = f"{name} has room for {full.capacity} entries"
    with pytest.raises(FullError, match=said):
        full.put(keys[-1], value)
    with pytest.raises(FullError, match=said):
        full.put_all((key, value) for key in keys[-4:])
    full.delete_all(keys)


def test_a_new_service_port_has_no_counts_of_the_one_before(loaded: LoadedObject) -> None:
    now = [1000.0]
    tables = Tables(loaded.maps, lambda: now[0])
    tables.write(diff(tables.read(), {}))
    used, end = HashMap(loaded.maps["used"]), layout.pack_address("10.244.0.5") + b"\x1f\x90"
    value = layout.ServiceValue(0, end, b"").pack()
    counts = bytes(used.value_size - 1) + b"\1"
    tables.write(diff({}, {b"Sshop/old: TCP IPv4": value}))
    key = layout.MEMBER_KEY.pack(tables.services.numbers[b"shop/old: TCP IPv4"], end)
    used.put(key, counts)
    tables.write(diff(tables.read(), {}))
    now[0] += QUARANTINE
    tables.write(diff({}, {b"Sshop/new: TCP IPv4": value}))
    assert layout.MEMBER_KEY.unpack(key)[0] == tables.services.numbers[b"shop/new: TCP IPv4"]
    assert used.get(key) is None
    used.put(key, counts)
    tables.write(diff(tables.read(), {b"Sshop/new: TCP IPv4": value}))
    assert used.get(key) == counts, "its own"
    tables.write(diff(tables.read(), {}))
    Tables(loaded.maps).repair()  # another process
    assert used.get(key) is None


def open_bpf_objects() -> int:
    """Count the descriptors of maps, programs and links that this process has."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of this list
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith("anon_inode:bpf") for link in links)


def test_an_attempt_to_open_that_fails_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: Tables) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    pins = bpffs() / "refused"
    datapath = Datapath(EbpfOptions(pins, file=compiled()))
    datapath.pins.create()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Tables, "repair", refuse)
            gc.collect()  # objects of earlier tests
            before = open_bpf_objects()
            for _ in range(2):
                with pytest.raises(OSError, match="no memory"):
                    datapath.read()
            assert open_bpf_objects() == before
        assert datapath.read() == {}
    finally:
        datapath.close()
        shutil.rmtree(pins, ignore_errors=True)
