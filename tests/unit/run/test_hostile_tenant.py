"""A hostile tenant beside a peaceful one: what the whole chain plans, lists and logs."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from steersman.run.observe import findings_log
from steersman.run.observe.findings_log import FindingsLog
from steersman.run.process.klog import ProcessLog
from tests.support.builders.store import make, slice_
from tests.support.modes.memory import World


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The log, written by the real handler."""
    logger, stream = logging.getLogger("steersman.test_hostile_tenant"), io.StringIO()
    logger.propagate = False
    ProcessLog(stream=stream, root=logger)
    monkeypatch.setattr(findings_log, "log", logger)
    yield stream
    logger.handlers.clear()


EVIL = "\x1b[31mx\n," * 30_000


def evil(world: World, number: int, text: str) -> None:
    """A Service and a slice with annotations of about 250 kB each."""
    name = f"evil{number}"
    service_notes = {"steersman/ipvs-scheduler-flags": text, "steersman/load-balancing": text}
    service_meta = {"namespace": "evil", "name": name, "annotations": service_notes}
    spec = {"clusterIP": f"10.96.1.{number}", "ports": [{"port": 80}]}
    world.store.upsert(make("Service", {"metadata": service_meta, "spec": spec}))
    labels = {"kubernetes.io/service-name": name}
    slice_notes = {"steersman/weight": text}
    meta = {"namespace": "evil", "name": name, "labels": labels, "annotations": slice_notes}
    ends = [{"addresses": ["10.1.1.1"]}]
    rest = {"addressType": "IPv4", "endpoints": ends, "ports": [{"name": "", "port": 8080}]}
    world.store.upsert(make("EndpointSlice", {"metadata": meta, **rest}))


async def test_annotations_full_of_nonsense(out: io.StringIO) -> None:
    world, log = World(), FindingsLog()
    for number in range(12):
        evil(world, number, EVIL)
    await world.run()
    log.update(world.sync.state.findings, world.sync.state.unlisted)
    assert len(world.sync.state.findings) == 12 * 3
    lines = out.getvalue().splitlines()
    assert len(lines) == 21  # 20 and how many more there are
    assert all(line.isprintable() and len(line) < 600 for line in lines)

    before = out.tell()
    world.store.upsert(slice_("s1-x", "s1", ("10.1.0.99",)))
    result = await world.run()
    log.update(world.sync.state.findings, world.sync.state.unlisted)
    assert result is not None
    assert (result.dirty, result.added, result.removed) == (1, 1, 1)
    assert out.tell() == before

    said = len(lines)
    for edit in range(500):  # an edit in a loop
        evil(world, 0, f"{edit},{EVIL}")
        await world.run()
        log.update(world.sync.state.findings, world.sync.state.unlisted)
    lines = out.getvalue().splitlines()
    assert len(lines) - said < 2 * 60 + 300
    assert len(out.getvalue()) < 200_000
