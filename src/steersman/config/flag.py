"""What a flag is: a row of the tables in flags.py and flags_upstream.py."""

from __future__ import annotations

import enum

import msgspec


class Group(enum.StrEnum):
    """A heading of `--help`, in the order shown."""

    GENERAL = "General"
    API = "API server"
    MODE = "Proxy mode and traffic"
    IPTABLES = "iptables mode"
    IPVS = "ipvs mode"
    CONNTRACK = "Connection tracking"
    SERVERS = "Health and metrics"
    LOGGING = "Logging"
    PROCESS = "Process"
    OWN = "Beyond upstream"
    OLD = "Accepted for older guides"


class Flag(msgspec.Struct, frozen=True):
    """A flag. Names, types and defaults of upstream's are upstream's."""

    name: str
    kind: str
    """Type as `--help` shows it; arguments.py knows how to read each."""
    default: str
    """Value where it is not given, as it would be written."""
    group: Group
    help: str
    target: str = ""
    """Path of the field of ProxyConfig that it sets; "" where commandline.py does more."""
    short: str = ""
    deprecated: str = ""
    """What to do instead; a flag that has this is hidden from `--help` and warned of."""
    choices: tuple[str, ...] = ()
    """Values to offer in shell completion."""
    repeatable: bool = False
    """A string that upstream takes once, and we as a list."""

    @property
    def optional_value(self) -> str:
        """The value of the bare flag; "" where a value has to follow."""
        return "true" if self.kind in ("bool", "version") else ""
