"""What the kernel has of ours, read by raw dumps, in the spelling that rendering produces."""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias, TypeVar

from steersman.host.netlink import DumpInterruptedError, Netlink, NetlinkError
from steersman.host.nlmsg import attributes, string, text
from steersman.model.errors import BusyError
from steersman.model.names import Family
from steersman.modes.nftables import wire
from steersman.modes.nftables.affinity import base_of, members_name, memory_name
from steersman.modes.nftables.derived import Counts, check_derived
from steersman.modes.nftables.dormant import DORMANT_CHAINS, awake, found_by
from steersman.modes.nftables.expressions import rule_count
from steersman.modes.nftables.layout import (
    SETS,
    TABLE,
    Form,
    Kind,
    SetSpec,
    named,
    prefix,
)
from steersman.modes.nftables.skeleton import RULE_CHAINS

_T = TypeVar("_T")
_ATTEMPTS = 6
_MARK = "steersman-"
_ANONYMOUS = "__"  # sets and maps within rules, which the rules' digests are of
Chains: TypeAlias = Mapping[str, Mapping[int, bytes]]
"""Attributes of chains, by name."""
_SPECS = {spec.name: spec for spec in SETS.values()}


class Mark(NamedTuple):
    """What the name of our marker chain says: hashes of the texts that were loaded, and of the
    rules that the kernel made of them."""

    foundation: str
    rules: str
    foundation_digest: str
    rules_digest: str

    @property
    def chain(self) -> str:
        """Name of the marker chain."""
        return _MARK + "-".join(self)


class Table(NamedTuple):
    """One family's table."""

    mark: Mark | None
    """None where the table is not ours, or not as we made it."""
    intact: bool
    """Whether the rules that follow the settings are as we made them."""
    awake: set[str]
    """Dormant chains whose rules are in (dormant.py)."""
    objects: dict[bytes, bytes]
    """Everything but the skeleton."""
    derived: Counts
    """What follows from them (derived.py)."""


def text_hash(text_: str) -> str:
    """Short hash of a text, for the marker."""
    return hashlib.sha256(text_.encode()).hexdigest()[:8]


def read_table(netlink: Netlink, family: Family, foundation: str) -> Table | None:
    """Read one family's table; None where there is none.

    A table on another foundation than this one (its hash) is not ours.

    Raises:
        BusyError: it changes faster than it can be read.
    """
    return _undisturbed(lambda: _read_table(netlink, family, foundation))


def _undisturbed(read: Callable[[], _T]) -> _T:
    """Read until nobody changes meanwhile what is read, or deletes it."""
    for _ in range(_ATTEMPTS):
        try:
            return read()
        except DumpInterruptedError:
            continue
        except NetlinkError as error:
            if error.errno != errno.ENOENT:
                raise
    raise BusyError("nftables: the ruleset changes faster than it can be read")


def _read_table(netlink: Netlink, family: Family, foundation: str) -> Table | None:
    chains = _chains(netlink, family)
    if chains is None:
        return None
    mark = next((_parse_mark(name) for name in chains if name.startswith(_MARK)), None)
    if mark is None or mark.foundation != foundation:
        return Table(None, False, set(), {}, {})
    rules = list(_rules(netlink, family))
    names = set_names(netlink, family)
    fixed, refilled = digests(chains, names, rules)
    if fixed != mark.foundation_digest:
        return Table(None, False, set(), {}, {})
    objects = dict(_service_chains(family, chains, rules))
    for name in names:
        objects.update(_elements(netlink, family, name))
        if "/" in name and name.startswith("affinity-"):
            objects.update(_forgotten(netlink, family, name, names))
    counts = check_derived(objects)
    chains_awake = awake(rule.chain for rule in rules if _accepts(chains.get(rule.chain, {})))
    objects = found_by(chains_awake, objects)
    return Table(mark, refilled == mark.rules_digest, chains_awake, objects, counts)


def _dump(netlink: Netlink, kind: int, family: Family, *more: bytes) -> Iterator[bytes]:
    request = wire.request(kind, family, text(1, TABLE), *more)
    return (reply.payload for reply in netlink.dump(request))


def _chains(netlink: Netlink, family: Family) -> Chains | None:
    """Our chains; None where there is no table of our name."""
    tables = [attributes(payload, 4) for payload in _dump(netlink, wire.GETTABLE, family)]
    if all(string(table.get(1, b"")) != TABLE for table in tables):
        return None
    chains = [attributes(payload, 4) for payload in _dump(netlink, wire.GETCHAIN, family)]
    return {string(chain[3]): chain for chain in chains if string(chain[1]) == TABLE}


def _accepts(chain: Mapping[int, bytes]) -> bool:
    """Whether a chain of a hook lets what it does not match pass, as all of ours do."""
    return chain.get(wire.CHAIN_POLICY, wire.ACCEPT) == wire.ACCEPT


def set_names(netlink: Netlink, family: Family) -> list[str]:
    """Names of our sets and maps."""
    found = [attributes(payload, 4) for payload in _dump(netlink, wire.GETSET, family)]
    return [string(each[2]) for each in found if string(each[1]) == TABLE]


def _parse_mark(name: str) -> Mark | None:
    words = name.removeprefix(_MARK).split("-")
    return Mark(*words) if len(words) == 4 else None


class RuleRead(NamedTuple):
    """A rule as far as it is compared."""

    chain: str
    expressions: bytes
    comment: str


def _rules(netlink: Netlink, family: Family) -> Iterator[RuleRead]:
    for payload in _dump(netlink, wire.GETRULE, family):
        rule = attributes(payload, 4)
        if string(rule[1]) == TABLE:
            comment = wire.comment_of(rule.get(7, b"")).decode(errors="replace")
            yield RuleRead(string(rule[2]), rule.get(4, b""), comment)


def read_digests(netlink: Netlink, family: Family) -> tuple[str, str]:
    """Digests of what is in force, for the marker; of no table at all, empty ones.

    Raises:
        BusyError: it changes faster than it can be read.
    """

    def read() -> tuple[str, str]:
        chains = _chains(netlink, family)
        if chains is None:
            return "", ""
        return digests(chains, set_names(netlink, family), _rules(netlink, family))

    return _undisturbed(read)


def digests(chains: Chains, sets: Iterable[str], rules: Iterable[RuleRead]) -> tuple[str, str]:
    """Hash the foundation (chains, sets and rules) and the rules that follow the settings."""
    foundation, refilled = hashlib.sha256(), hashlib.sha256()
    for name in sorted(chains):
        hook = b"".join(chains[name].get(kind, b"") for kind in wire.CHAIN_HOOK)
        if _is_fixed(name) or (name in DORMANT_CHAINS and not hook):
            foundation.update(f"{name}\0{len(hook)}\0".encode() + hook)
    for name in sorted(sets):
        if "/" not in name and not name.startswith(_ANONYMOUS):
            foundation.update(f"{name}\0".encode())
    for rule in rules:
        if _is_fixed(rule.chain):
            hasher = refilled if rule.chain in RULE_CHAINS else foundation
            hasher.update(f"{rule.chain}\0{len(rule.expressions)}\0".encode())
            hasher.update(rule.expressions)
    return foundation.hexdigest()[:8], refilled.hexdigest()[:8]


def _is_fixed(chain: str) -> bool:
    """Whether a chain is there whatever Services there are."""
    return not ("/" in chain or chain in DORMANT_CHAINS or chain.startswith(_MARK))


def _service_chains(
    family: Family, chains: Iterable[str], rules: Iterable[RuleRead]
) -> Iterator[tuple[bytes, bytes]]:
    """ServicePorts' chains; one whose rules are not as many as they should be has no value."""
    values: dict[str, list[str]] = {name: [] for name in chains if "/" in name}
    for rule in rules:
        if rule.chain in values:
            values[rule.chain].append(rule.comment)
    for name, comments in values.items():
        whole = bool(comments and comments[0]) and rule_count(comments[0]) == len(comments)
        yield named(Kind.CHAIN, family, name), comments[0].encode() if whole else b""


def is_members(name: str) -> bool:
    """Whether a set is that of a ServicePort's endpoints (affinity.py)."""
    return "/" in name and name.startswith("members-")


def _elements(netlink: Netlink, family: Family, name: str) -> Iterator[tuple[bytes, bytes]]:
    if name in _SPECS:
        yield from _fixed_elements(netlink, family, _SPECS[name])
    elif is_members(name):
        yield named(Kind.MEMBERS, family, name), b""
        start = named(Kind.MEMBER, family, name) + b"\0"
        size = family.bits // 8 + 4
        for content in set_elements(netlink, family, name):
            yield start + content[8 : 8 + size], b""
    elif "/" in name:
        yield named(Kind.AFFINITY, family, name), b""


def _forgotten(
    netlink: Netlink, family: Family, name: str, names: Iterable[str]
) -> Iterator[tuple[bytes, bytes]]:
    """Clients in a map that stick to an endpoint that is no member."""
    remembered = list(memory(netlink, family, name))
    if not remembered:
        return
    base = base_of(name)
    local = base.startswith("local-")
    members = members_name(base.removeprefix("local-"), local)
    size = family.bits // 8 + 4
    contents = set_elements(netlink, family, members) if members in names else ()
    known = {content[8 : 8 + size] for content in contents}
    start = named(Kind.REMEMBERED, family, name) + b"\0"
    for client, endpoint in remembered:
        if endpoint not in known:
            yield start + client, endpoint


def memory(netlink: Netlink, family: Family, name: str) -> Iterator[tuple[bytes, bytes]]:
    """Clients and endpoints in an affinity map."""
    key, data = family.bits // 8, family.bits // 8 + 4
    for content in set_elements(netlink, family, name):
        yield content[8 : 8 + key], content[16 + key : 16 + key + data]


def set_elements(
    netlink: Netlink, family: Family, name: str, holding: re.Pattern[bytes] | None = None
) -> Iterator[bytes]:
    """Contents of a set's elements: key (its value at 8), then data (its value 16 behind).

    With a pattern, messages of some 300 elements in which it is not found are skipped whole.
    """
    for payload in _dump(netlink, wire.GETSETELEM, family, text(2, name)):
        if holding is None or holding.search(payload):
            yield from wire.element_lists(payload)


def _fixed_elements(
    netlink: Netlink, family: Family, spec: SetSpec
) -> Iterator[tuple[bytes, bytes]]:
    start = prefix(spec.kind, family)
    rest, width = 8 + spec.key_size(family), family.bits // 8
    contents = set_elements(netlink, family, spec.name)
    if spec.form is Form.ENDPOINTS:  # most elements are: a third less for them
        first, last = rest + 8, rest + 12 + width
        return ((start + each[8:rest], each[first:last]) for each in contents)
    value = _VALUES[spec.form]
    return ((start + each[8:rest], value(each, rest, width)) for each in contents)


def _set_value(content: bytes, rest: int, _width: int) -> bytes:
    if len(content) <= rest:
        return b""
    return wire.comment_of(attributes(content, rest).get(wire.ELEMENT_USERDATA, b""))


def _verdict_value(content: bytes, rest: int, _width: int) -> bytes:
    found = attributes(content, rest)
    word = wire.verdict_word(found.get(wire.ELEMENT_DATA, b""))
    return word + b"\0" + wire.comment_of(found.get(wire.ELEMENT_USERDATA, b""))


def _interval_value(content: bytes, rest: int, width: int) -> bytes:
    end = attributes(content, rest).get(wire.ELEMENT_KEY_END, b"")
    return end[-width:]


_VALUES: dict[Form, Callable[[bytes, int, int], bytes]] = {
    Form.SET: _set_value,
    Form.VERDICTS: _verdict_value,
    Form.INTERVALS: _interval_value,
}


def service_memory(members: bytes) -> str:
    """Name of the map that learns the endpoints of a set."""
    name = members.decode().removeprefix("members-")
    local = name.startswith("local-")
    return memory_name(name.removeprefix("local-"), local)
