"""Who we are to the API server: tokens, passwords, certificates, and plugins that hand them out.

Files are read again for every request (there are few requests, and what is in the file is always
right); a plugin is asked when its credential expired or was refused.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from steersman.host.exec import Exec, SubprocessExec
from steersman.host.files import read_file
from steersman.source.kubeconfig import ClusterAccess, ExecPlugin

PLUGIN_TIMEOUT = 60.0
EXPIRY_MARGIN = 10.0
"""Seconds before its end at which a credential is no longer used."""
REFUSED_MARGIN = 10.0
"""Seconds between two runs of a plugin whose credential is refused."""

_MOST_BYTES = 1 << 20  # of a token

log = logging.getLogger("steersman.source")


class CredentialError(Exception):
    """There is nothing to show who we are: what failed and what to do."""


class KeyPair(NamedTuple):
    """A client certificate with its key, in PEM."""

    certificate: bytes
    key: bytes


class _Given(msgspec.Struct, frozen=True, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str
    kind: str
    status: _Given | None = None


def _environment_exec(environment: Mapping[str, str]) -> Exec:
    return SubprocessExec(environment=environment)


class Credentials:
    """What to send with the next request."""

    def __init__(
        self,
        access: ClusterAccess,
        make_exec: Callable[[Mapping[str, str]], Exec] = _environment_exec,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Take what the kubeconfig says.

        Args:
            access: where the credentials come from.
            make_exec: runs programs with these variables added.
            wall_clock: seconds since 1970, for what expires.
        """
        self._access = access
        self._token = access.token
        self._warned: set[str] = set()
        plugin = access.exec_plugin
        self._name = plugin.command if plugin else ""
        self._plugin = _Plugin(plugin, make_exec, wall_clock) if plugin else None

    @property
    def words(self) -> str:
        """What is shown, for people: where it comes from, never what it is. "" for nothing."""
        access = self._access
        words = {
            f"the token of {access.token_file}": access.token_file,
            f"the token of {access.origin}": access.token,
            f"the credential of the exec plugin {self._name}": self._plugin,
            f"the password of user {access.username}": access.username,
            f"the client certificate of {access.origin}": access.client_certificate,
            "impersonation": access.impersonate,
        }
        return next((text for text, given in words.items() if given), "")

    async def headers(self) -> list[tuple[str, str]]:
        """Return the headers that show who we are.

        Raises:
            CredentialError: a file or plugin that should say so does not.
        """
        access = self._access
        headers = list(access.impersonate)
        token = self._current_token()
        if self._plugin is not None and not token:
            token = (await self._plugin.credential()).token or ""
        if token:
            headers.append(("Authorization", f"Bearer {token}"))
        elif access.username:
            pair = f"{access.username}:{access.password}".encode()
            headers.append(("Authorization", f"Basic {base64.b64encode(pair).decode()}"))
        return headers

    def withheld(self, server: str) -> list[tuple[str, str]]:
        """Return the headers for a server of plain http: none, as with client-go."""
        words = self.words
        if words and server not in self._warned:
            self._warned.add(server)
            log.warning("%s is plain http, so %s is not sent; use https", server, words)
        return []

    async def key_pair(self) -> KeyPair | None:
        """Return the client certificate to use, if any.

        Raises:
            CredentialError: it cannot be read.
        """
        access = self._access
        if access.client_certificate:
            try:
                return KeyPair(access.client_certificate.read(), access.client_key.read())
            except OSError as error:
                raise CredentialError(f"client certificate: {error}") from error
        given = await self._plugin.credential() if self._plugin is not None else _Given()
        if not given.client_certificate_data or not given.client_key_data:
            return None
        return KeyPair(given.client_certificate_data.encode(), given.client_key_data.encode())

    def refused(self) -> None:
        """Take note that the server answered 401: a plugin is to be asked again."""
        if self._plugin is not None:
            self._plugin.refused()

    def _current_token(self) -> str:
        path = self._access.token_file
        if not path:
            return self._token
        try:
            token = read_file(path, _MOST_BYTES).decode().strip()
        except (OSError, ValueError) as error:
            if not self._token:
                raise CredentialError(f"token file: {error}") from error
            token = ""
        self._token = token or self._token  # an emptied file is being written: keep the last one
        return self._token


class _Plugin:
    """An exec plugin and the credential that it last gave."""

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
        self._given: _Given | None = None
        self._asked = float("-inf")
        self._lock = asyncio.Lock()

    def refused(self) -> None:
        if abs(self._now() - self._asked) >= REFUSED_MARGIN:  # the clock may have been set back
            self._given = None

    async def credential(self) -> _Given:
        async with self._lock:
            if self._given is None or self._expired(self._given):
                self._asked = self._now()
                self._given = _decoded(self._plugin, await self._run())
            return self._given

    def _expired(self, given: _Given) -> bool:
        end = given.expiration_timestamp
        return end is not None and end.timestamp() - EXPIRY_MARGIN <= self._now()

    async def _run(self) -> bytes:
        plugin = self._plugin
        try:
            result = await self._exec.run((plugin.command, *plugin.args), timeout=PLUGIN_TIMEOUT)
        except FileNotFoundError as error:
            hint = plugin.install_hint or "install it or correct users[].user.exec.command"
            raise CredentialError(
                f"exec plugin {plugin.command}: no such program; {hint}"
            ) from error
        except OSError as error:  # TimeoutError is one
            raise CredentialError(f"exec plugin {plugin.command}: {error}") from error
        if result.returncode:
            problem = result.message or "it said nothing"
            status = f"ended with status {result.returncode}"
            raise CredentialError(f"exec plugin {plugin.command} {status}: {problem}")
        return result.stdout


def _decoded(plugin: ExecPlugin, text: bytes) -> _Given:
    what = f"exec plugin {plugin.command}"
    try:
        answer = msgspec.json.decode(text, type=_ExecCredential)
    except ValueError as error:
        raise CredentialError(f"{what}: its answer is not an ExecCredential: {error}") from error
    if answer.kind != "ExecCredential" or answer.api_version != plugin.api_version:
        given = f"{answer.api_version} {answer.kind}"
        wanted = f"{plugin.api_version} ExecCredential"
        raise CredentialError(f"{what}: answered {given}, wanted {wanted}")
    status = answer.status
    if status is None or not (status.token or status.client_certificate_data):
        raise CredentialError(f"{what}: its answer holds neither a token nor a certificate")
    if bool(status.client_certificate_data) != bool(status.client_key_data):
        raise CredentialError(f"{what}: its certificate and key must come together")
    return status
