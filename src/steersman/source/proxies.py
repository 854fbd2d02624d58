"""Which proxy leads to a server, by the variables `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from steersman.model.addresses import canonical_cidr, canonical_ip, in_cidr

PROXY_SCHEMES = ("http", "https")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_WITH_PORT = re.compile(r"(\[.*\]|[^:]*):([0-9]+)")  # more colons: an IPv6 address


def environment_proxy(server: str, environ: Mapping[str, str]) -> str | None:
    """Return the proxy for a server, as Go does.

    Loopback addresses never use one. `NO_PROXY` lists names (with their subdomains), addresses and
    CIDRs; names and addresses may have a port.
    """
    parts = urlsplit(server)
    proxy, bypassed = (_variable(environ, f"{word}_proxy") for word in (parts.scheme, "no"))
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    if not proxy or _bypasses_proxy(parts.hostname or "", port, bypassed):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _variable(environ: Mapping[str, str], name: str) -> str:
    """Return the variable with this name in upper case; if that is empty, in lower case."""
    return environ.get(name.upper()) or environ.get(name, "")


def _bypasses_proxy(host: str, port: int, no_proxy: str) -> bool:
    address = canonical_ip(host)
    if host == "localhost" or (address and (address.startswith("127.") or address == "::1")):
        return True
    for entry in (part.strip().lower() for part in no_proxy.split(",")):
        if entry == "*":
            return True
        with_port = _WITH_PORT.fullmatch(entry)
        if with_port and int(with_port[2]) != port:
            continue
        word = (with_port[1] if with_port else entry).strip("[]")
        if word and (word == host or (address and canonical_ip(word) == address)):
            return True
        cidr = canonical_cidr(word)
        if address and cidr and in_cidr(address, cidr):
            return True
        # `example.org`, `.example.org` and `*.example.org` mean all subdomains.
        if word and not address and host.endswith("." + word.lstrip("*").lstrip(".")):
            return True
    return False
