"""A Ruleset of this mode as nft commands: what operators see, goldens hold, and a rebuild loads."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

from steersman.model.names import Family, Protocol
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.nftables.layout import (
    DROP,
    REJECT,
    SETS,
    TABLE,
    Form,
    Kind,
    is_local,
    unpack_slot,
)
from steersman.modes.nftables.skeleton import HEADER
from steersman.proxy.listeners import ListenerPlan

_NAMES = {protocol.number: protocol.lower() for protocol in Protocol}


def table_of(key: bytes) -> str:
    """Family and name of the table that an object is in."""
    return f"{HEADER[Family(key[1])]} {TABLE}"


def ruleset_text(ruleset: Ruleset) -> str:
    """Everything, in an order of its own: by kind, family and key."""
    return "".join(f"{line}\n" for line in _lines(ruleset))


def _lines(ruleset: Ruleset) -> Iterator[str]:
    for key in sorted(ruleset):
        yield from command("add", key, ruleset[key]).rstrip("\n").split("\n")


def diff_text(change: Diff) -> str:
    """What a Diff does."""
    lines = [command("delete", key, value) for key, value in sorted(change.removed.items())]
    for key, (old, new) in sorted(change.changed.items()):
        lines += [command("delete", key, old), command("add", key, new)]
    lines += [command("add", key, value) for key, value in sorted(change.added.items())]
    return "".join(f"{line}\n" for line in lines)


def command(verb: str, key: bytes, value: bytes | str | ListenerPlan) -> str:
    """One object as an nft command; what nft has no words for is a comment."""
    kind = Kind(key[0])
    if isinstance(value, ListenerPlan):
        return f"# {verb} listener at {value}"
    if isinstance(value, str):
        return value if verb == "add" else f"{verb} table {table_of(key)}"
    if kind in SETS:
        here = "  # local" if SETS[kind].form is Form.ENDPOINTS and is_local(value) else ""
        return f"{verb} element {table_of(key)} {SETS[kind].name} {{ {element(key, value)} }}{here}"
    name = key[2:].split(b"\0")[0].decode()
    if kind is Kind.MEMBER:
        member = endpoint(key[3 + len(name.encode()) :])
        return f"{verb} element {table_of(key)} {name} {{ {member} }}"
    noun = {Kind.CHAIN: "chain", Kind.MEMBERS: "set"}.get(kind, "map")
    does = f"  # {value.decode()}" if value else ""
    return f"{verb} {noun} {table_of(key)} {name}{does}"


def element(key: bytes, value: bytes) -> str:
    """An element of a fixed set, as nft prints it."""
    spec = SETS[key[0]]
    fields = list(_fields(spec.fields, key))
    match spec.form:
        case Form.VERDICTS:
            chain, _, comment = value.partition(b"\0")
            verdict = chain.decode() if chain in (DROP, REJECT) else f"goto {chain.decode()}"
            return f"{' . '.join(fields)}{_comment(comment)} : {verdict}"
        case Form.ENDPOINTS:
            return f"{' . '.join(fields)} : {endpoint(value)}"
        case Form.INTERVALS:
            fields[-1] += f"-{address(value)}"
            return " . ".join(fields)
        case _:
            return " . ".join(fields) + _comment(value)


def describe(keys: Iterable[bytes]) -> str:
    """Objects in few words, for error messages."""
    listed = list(keys)
    more = f" and {len(listed) - 1} more" if len(listed) > 1 else ""
    first = listed[0]
    if first[0] in SETS:
        spec = SETS[first[0]]
        what = f"element {' . '.join(_fields(spec.fields, first))} of {spec.name}"
    else:
        name = first[2:].split(b"\0")[0].decode()
        what = f"{Kind(first[0]).name.lower()} {name}".rstrip()
    return f"{what}{more} in table {table_of(first)}"


def endpoint(data: bytes) -> str:
    """Address and port."""
    return f"{address(data[:-4])} . {int.from_bytes(data[-4:-2], 'big')}"


def _comment(comment: bytes) -> str:
    return f' comment "{comment.decode()}"' if comment else ""


def address(data: bytes) -> str:
    """A packed address."""
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def _fields(fields: str, key: bytes) -> Iterator[str]:
    at = 2
    for field in fields:
        if field == "a":
            size = Family(key[1]).bits // 8
            yield address(key[at : at + size])
            at += size
            continue
        word = key[at : at + 4]
        at += 4
        if field == "p":
            yield _NAMES[word[0]]
        elif field == "t":
            yield str(int.from_bytes(word[:2], "big"))
        else:
            yield str(unpack_slot(key))
