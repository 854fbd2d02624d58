"""How much of each program the verifier has to look at: a table, so that growth is seen."""

from __future__ import annotations

import struct
from pathlib import Path

from steersman.modes.ebpf import failures, trace_events
from steersman.modes.ebpf.bpf import Object
from steersman.modes.ebpf.loader import LoadedObject, OpenedObject
from tests.support.lab.ebpf import compiled
from tests.support.lab.ebpf_node import MARKS

pytestmark = MARKS
TABLE = Path(__file__).with_name("ebpf_verified.txt")
HEAD = """\
# Instructions that the verifier looks at (bpf_prog_info.verified_insns), by program; its limit is a
# million. `pytest tests/kernel/test_ebpf_verifier.py --update` writes them; clang 14, Linux 6.18.
"""
TOLERANCE = 1.15
"""Compilers and kernels differ a little."""
VERIFIED = 216
"""Where struct bpf_prog_info has verified_insns (Linux 5.16)."""


def verified(program: int) -> int:
    (number,) = struct.unpack_from("=I", Object(program).info(VERIFIED + 4), VERIFIED)
    return int(number)


def table() -> dict[str, int]:
    lines = TABLE.read_text().splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return {name: int(number) for name, number in rows}


def test_the_verifier_has_no_more_to_do_than_the_table_says(update: bool) -> None:
    loaded = LoadedObject(compiled(), None)
    found = {name: verified(program) for name, program in sorted(loaded.programs.items())}
    loaded.close()
    for file in (trace_events.FILE, failures.FILE):
        beside = OpenedObject(file)  # with maps of its own, as no daemon runs
        beside.load()
        programs = sorted(beside.descriptors("program").items())
        found |= {name: verified(program) for name, program in programs}
        beside.close()
    if update:
        TABLE.write_text(HEAD + "".join(f"{n:16} {count:7}\n" for n, count in found.items()))
    known = table()
    assert found.keys() == known.keys()
    grown = {n: (known[n], count) for n, count in found.items() if count > known[n] * TOLERANCE}
    assert not grown, "more than the table says; --update it if that is worth it"
