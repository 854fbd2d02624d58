"""Doctor's checks of connection tracking, on a fake /proc."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steersman.model.conntrack import Stale, pack_socket
from steersman.model.plan import Traits
from steersman.operate.doctor import node_conntrack
from steersman.operate.doctor.check import Check
from steersman.operate.doctor.result import CheckResult, Verdict
from tests.support.builders.doctor import context_of, named, only
from tests.support.builders.objects import endpoint, port, service, slice_

TABLE, FAILURES, STALE = named("conntrack-table", "conntrack-failures", "conntrack-stale")
FOLDER = "proc/sys/net/netfilter/nf_conntrack_"
STATISTICS = "proc/net/stat/nf_conntrack"


def ask(check: Check, root: Path, files: dict[str, str], *things: Any, **more: Any) -> CheckResult:
    return only(check, context_of(*things, root=root, files=files, **more))


@pytest.mark.parametrize(
    ("entries", "verdict"),
    [(10, Verdict.OK), (950, Verdict.WARNING), (1000, Verdict.ERROR), (995, Verdict.ERROR)],
)
def test_room_in_the_table(entries: int, verdict: Verdict, tmp_path: Path) -> None:
    files = {f"{FOLDER}count": str(entries), f"{FOLDER}max": "1000"}
    result = ask(TABLE, tmp_path, files)
    assert result.verdict is verdict
    assert f"{entries} of 1000 entries" in result.text


def test_a_kernel_without_conntrack(tmp_path: Path) -> None:
    assert ask(TABLE, tmp_path, {}).verdict is Verdict.UNKNOWN
    untracked = {"traits": Traits(tracks_connections=False)}
    assert ask(TABLE, tmp_path, {}, world=untracked).verdict is Verdict.SKIPPED


def counted(drop: int, failed: int) -> str:
    return f"entries  drop insert_failed\n00000001 {drop:08x} {failed:08x}\n00000001 00000010 0\n"


def test_counters_are_summed_over_cpus() -> None:
    assert node_conntrack.statistics(counted(0x20, 3)) == {
        "entries": 2,
        "drop": 0x30,
        "insert_failed": 3,
    }


def test_failures_count_while_they_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_conntrack, "_COUNTED", 0.0)
    old = ask(FAILURES, tmp_path, {STATISTICS: counted(1, 0)})
    assert old.verdict is Verdict.OK
    assert len(old.evidence) == 1
    texts = iter((counted(1, 0), counted(1, 5)))
    context = context_of(root=tmp_path, files={STATISTICS: ""})
    monkeypatch.setattr(context, "read", lambda _: next(texts))
    growing = only(FAILURES, context)
    assert growing.verdict is Verdict.WARNING
    assert growing.text.startswith("5 connections lost")


DNS = service(ports=[port("dns", 53, protocol="UDP")])
ENDS = slice_(endpoint("10.0.0.5"), ports=[port("dns", 5353, protocol="UDP")])


def test_entries_of_former_endpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Stale] = []

    def find(stale: Stale) -> list[tuple[bytes, bytes]]:
        asked.append(stale)
        old = bytes((17,)) + pack_socket("10.96.0.10", 53), pack_socket("10.0.0.9", 5353)
        return [old] if stale.contains(*old) else []

    monkeypatch.setattr(node_conntrack, "find_stale", find)
    result = ask(STALE, tmp_path, {}, DNS, ENDS)
    assert result.verdict is Verdict.ERROR
    assert result.evidence == ("UDP to 10.96.0.10:53 goes to 10.0.0.9:5353",)
    assert asked
    ends = slice_(endpoint("10.0.0.9"), ports=[port("dns", 5353, protocol="UDP")])
    assert ask(STALE, tmp_path, {}, DNS, ends).verdict is Verdict.OK
    assert ask(STALE, tmp_path, {}, service()).verdict is Verdict.SKIPPED
