"""Which way to connect to a server: directly or through a proxy, with TLS or without."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from steersman.model.addresses import join_host_port, without_password

Headers: TypeAlias = Sequence[tuple[str, str]]
"""Names and values."""


class Hop(NamedTuple):
    """A server or a proxy."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    name: str
    """That its certificate must have."""

    @classmethod
    def of(cls, url: str, tls: ssl.SSLContext | None, name: str = "") -> Hop:
        """Return the hop of a URL; `tls` and `name` are for https only.

        Raises:
            ValueError: it is not a URL of http or https.
        """
        try:
            parts = urlsplit(url)
            # This also refuses what cannot be a name; getaddrinfo(3) would raise something else.
            host = unquote(parts.hostname or "").encode("idna").decode()
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            host, port = "", 0
        if not host:
            shown = repr(without_password(url))
            raise ValueError(f"{shown} is not a URL such as https://10.0.0.1:6443")
        if parts.scheme == "http":
            return cls(host, port, None, "")
        assert tls is not None
        return cls(host, port, tls, name or host.rstrip("."))

    def __str__(self) -> str:
        return join_host_port(self.host, self.port)

    @property
    def header(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host.partition('%')[0]}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class Route(NamedTuple):
    """How to connect to a server; requests with equal ones may share connections.

    A TLS context with other credentials makes another Route, so no request uses a connection that
    was opened with earlier ones.
    """

    server: Hop
    proxy: Hop | None = None
    proxy_headers: Headers = ()
    """The proxy's user and password."""

    @classmethod
    def of(cls, url: str, tls: ssl.SSLContext | None, name: str, proxy: str) -> Route:
        """Return the route to a URL, through a proxy unless that is ""; raises as `Hop.of`."""
        server = Hop.of(url, tls, name)
        if not proxy:
            return cls(server)
        hop, parts = Hop.of(proxy, tls), urlsplit(proxy)
        if parts.username is None:
            return cls(server, hop)
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        basic = f"Basic {base64.b64encode(pair).decode()}"
        return cls(server, hop, (("Proxy-Authorization", basic),))
