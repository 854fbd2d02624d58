"""What verifiers say of the programs: how much they look at, and what only older ones refuse."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from steersman.host.bpf_object import OpenedObject
from steersman.host.libbpf import library
from steersman.modes.ebpf import failures, trace_events
from steersman.modes.ebpf.bpf import Object
from steersman.modes.ebpf.loader import LoadedObject
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


INSTRUCTION = struct.Struct("=BBhi")
JUMPS, CALL, EXIT, JUMP = (5, 6), 0x85, 0x95, 0x05  # classes and codes
LOAD_LONG, FUNCTION, CALLBACK = 0x18, 1, 4  # two places; values of src_reg


def instructions(program: int) -> list[tuple[int, int, int, int]]:
    """Code, registers, offset and value of each, as libbpf gave them to the kernel."""
    insns, count = library().bpf_program__insns, library().bpf_program__insn_cnt
    insns.restype, insns.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    count.restype, count.argtypes = ctypes.c_size_t, (ctypes.c_void_p,)
    raw = ctypes.string_at(insns(program), count(program) * INSTRUCTION.size)
    return list(INSTRUCTION.iter_unpack(raw))


def next_places(program: list[tuple[int, int, int, int]], at: int) -> Iterator[tuple[int, bool]]:
    """Where the kernel looks for loops next, in its order; and whether a loop may end there."""
    code, registers, offset, value = program[at]
    if code == EXIT:
        return
    if code == JUMP:
        yield at + 1 + offset, True
        return
    jumps = code & 7 in JUMPS and code != CALL
    yield at + 1, jumps
    if jumps:
        yield at + 1 + offset, True
    elif (code, registers >> 4) in ((CALL, FUNCTION), (LOAD_LONG, CALLBACK)):
        yield at + 1 + value, False


def refused_loops(program: list[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """Where an instruction that is no jump closes a loop, by falling through to its head.

    Linux before 6.3 looks for loops depth first and refuses these ("back-edge from insn").
    """
    refused, seen, open_places = [], {0}, {0}
    path = [(0, next_places(program, 0))]
    while path:
        at, rest = path[-1]
        for place, may_end in rest:
            if place in open_places and not may_end:
                refused.append((at, place))
            if place not in seen:
                seen.add(place)
                open_places.add(place)
                path.append((place, next_places(program, place)))
                break
        else:
            path.pop()
            open_places.remove(at)
    return refused


@pytest.mark.parametrize("file", [compiled(), trace_events.FILE, failures.FILE])
def test_no_loop_is_closed_by_a_fall_through(file: Path) -> None:
    """Clang chooses that, so an innocent change may bring it; `tests/vm` has such a kernel."""
    opened = OpenedObject(file)
    opened.load()
    found = {name: refused_loops(instructions(each)) for name, each in opened.each("program")}
    opened.close()
    assert not {name: places for name, places in found.items() if places}
