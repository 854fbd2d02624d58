"""Credentials for the API server: tokens, passwords, client certificates, exec plugins.

Files are read again for every request: there are few requests, and the file is always up to date.
A plugin is run again when its credential has expired or was refused.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from steersman.host.exec import Exec, SubprocessExec
from steersman.host.files import read_file
from steersman.source.kubeconfig import ClusterAccess, ExecPlugin
from steersman.source.tls import KeyPair

PLUGIN_TIMEOUT = 60.0
EXPIRY_MARGIN = 10.0
"""Seconds before its expiry at which a credential is no longer used."""
REFUSED_MARGIN = 10.0
"""Minimum seconds between two runs of a plugin if its credential is refused."""

MAX_ANSWER = 1 << 20
"""Bytes that a plugin may write."""

_MAX_TOKEN_BYTES = 1 << 20

log = logging.getLogger("steersman.source")


class CredentialError(Exception):
    """There is no credential; the message says what failed and what to do."""


class _PluginStatus(msgspec.Struct, frozen=True, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    status: _PluginStatus | None = None


class Credentials:
    """The credentials to send with the next request."""

    def __init__(
        self,
        access: ClusterAccess,
        make_exec: Callable[[Mapping[str, str]], Exec] = lambda env: SubprocessExec(
            env, max_output=MAX_ANSWER
        ),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Configure the credentials; nothing is read yet.

        Args:
            make_exec: returns an Exec that adds variables to the environment.
        """
        self._access = access
        self._token = access.token
        self._warned: set[str] = set()
        plugin = access.exec_plugin
        self._name = plugin.command if plugin else ""
        self._plugin = _Plugin(plugin, make_exec, wall_clock) if plugin else None

    @property
    def description(self) -> str:
        """Origin of the credential for messages, never its value; "" if there is none."""
        access = self._access
        origins = {
            f"the token of {access.token_file}": access.token_file,
            f"the token of {access.origin}": access.token,
            f"the credential of the exec plugin {self._name}": self._plugin,
            f"the password of user {access.username}": access.username,
            f"the client certificate of {access.origin}": access.client_certificate,
            "impersonation": access.impersonate,
        }
        return next((text for text, given in origins.items() if given), "")

    async def headers(self) -> list[tuple[str, str]]:
        """Return the headers with the credential.

        Raises:
            CredentialError: a file or plugin does not provide it.
        """
        access = self._access
        # The first one of: token file, token, plugin, user name and password.
        headers = list(access.impersonate)
        token = self._token
        if access.token_file:
            try:
                token = read_file(access.token_file, _MAX_TOKEN_BYTES).decode().strip()
            except (OSError, ValueError) as error:
                if not self._token:
                    reason = error.strerror if isinstance(error, OSError) else error
                    raise CredentialError(f"token file {access.token_file}: {reason}") from error
                token = ""
            # An empty file is being written: use the last token.
            self._token = token = token or self._token
        if self._plugin is not None and not token:
            token = (await self._plugin.credential()).token or ""
        if token:
            headers.append(("Authorization", f"Bearer {token}"))
        elif access.username:
            pair = f"{access.username}:{access.password}".encode()
            headers.append(("Authorization", f"Basic {base64.b64encode(pair).decode()}"))
        return headers

    def withheld(self, server: str) -> list[tuple[str, str]]:
        """Return the headers for a plain http server: none, as in client-go."""
        description = self.description
        if description and server not in self._warned:
            self._warned.add(server)
            log.warning("%s is plain http, so %s is not sent; use https", server, description)
        return []

    async def key_pair(self) -> KeyPair | None:
        """Return the client certificate, if there is one.

        Raises:
            CredentialError: it cannot be read.
        """
        access = self._access
        if access.client_certificate:
            try:
                return KeyPair(access.client_certificate.read(), access.client_key.read())
            except OSError as error:
                raise CredentialError(f"client certificate: {error}") from error
        given = await self._plugin.credential() if self._plugin is not None else _PluginStatus()
        if not given.client_certificate_data or not given.client_key_data:
            return None
        return KeyPair(given.client_certificate_data.encode(), given.client_key_data.encode())

    def refused(self) -> None:
        """Record that the server answered 401: the plugin is run again."""
        if self._plugin is not None:
            self._plugin.refused()


class _Plugin:
    """An exec plugin and its last credential."""

    def __init__(
        self,
        plugin: ExecPlugin,
        make_exec: Callable[[Mapping[str, str]], Exec],
        wall_clock: Callable[[], float],
    ) -> None:
        self._plugin = plugin
        spec: dict[str, Any] = {"interactive": False}
        if plugin.cluster is not None:
            spec["cluster"] = dict(plugin.cluster)
        request = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
        # The plugin's variables come first: the protocol's own must not be overridden.
        environment = {**plugin.env, "KUBERNETES_EXEC_INFO": json.dumps(request)}
        self._exec = make_exec(environment)
        self._now = wall_clock
        self._given: _PluginStatus | None = None
        self._asked = float("-inf")
        self._lock = asyncio.Lock()
        self._failure = ""  # why the last run gave no credential
        self._runs = 0

    def refused(self) -> None:
        if abs(self._now() - self._asked) >= REFUSED_MARGIN:  # the clock may have been set back
            self._given = None

    async def credential(self) -> _PluginStatus:
        runs = self._runs
        async with self._lock:
            given = self._given
            expires = given.expiration_timestamp if given is not None else None
            expired = expires is not None and expires.timestamp() - EXPIRY_MARGIN <= self._now()
            if given is not None and not expired:
                return given
            # All that wait for one run share its failure: it may take a minute.
            if self._failure and self._runs != runs:
                raise CredentialError(self._failure)
            self._asked, self._failure = self._now(), ""
            try:
                self._given = given = await self._run()
            except CredentialError as error:
                self._failure = str(error)
                raise
            finally:
                self._runs += 1
            return given

    async def _run(self) -> _PluginStatus:
        """Run the plugin; return its credential, or raise CredentialError."""
        plugin, name = self._plugin, f"exec plugin {self._plugin.command}"
        try:
            result = await self._exec.run((plugin.command, *plugin.args), timeout=PLUGIN_TIMEOUT)
        except FileNotFoundError as error:
            hint = plugin.install_hint or "install it or correct users[].user.exec.command"
            raise CredentialError(f"{name}: no such program; {hint}") from error
        except OSError as error:  # TimeoutError is one
            raise CredentialError(f"{name}: {error}") from error
        if result.returncode:
            problem = result.message or "no message"
            raise CredentialError(f"{name} ended with status {result.returncode}: {problem}")
        try:
            answer = msgspec.json.decode(result.stdout, type=_ExecCredential)
        except ValueError as error:
            raise CredentialError(
                f"{name}: its answer is not an ExecCredential: {error}"
            ) from error
        if answer.kind != "ExecCredential" or answer.api_version != plugin.api_version:
            got, expected = f"{answer.api_version} {answer.kind}", plugin.api_version
            raise CredentialError(f"{name}: expected {expected} ExecCredential, got {got}")
        status = answer.status
        if status is None or not (status.token or status.client_certificate_data):
            raise CredentialError(f"{name}: its answer has neither a token nor a certificate")
        if bool(status.client_certificate_data) != bool(status.client_key_data):
            raise CredentialError(f"{name}: its certificate and key must come together")
        return status
