"""The client of the running process's local socket (run/serve/control.py)."""

from __future__ import annotations

import hmac
import http.client
import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from steersman.host import local_port
from steersman.host.local_port import NONCE, PROOF, LocalPort, find
from steersman.host.peers import CONTROL, is_trusted, peer
from steersman.host.process import CAP_NET_ADMIN, activity, has_capability
from steersman.operate.answer import QuestionError

_TIMEOUT = 30.0  # seconds without a byte
_LOOK = 1.0  # seconds between two looks at a process that does not answer
_COMPUTED = frozenset({"/world"})
"""Pages for which the process needs nothing but CPU time."""
_IDLE = 5
"""Looks after which a process that uses no CPU time is taken for hung."""


class NotRunningError(QuestionError):
    """No steersman process serves the local socket of this network namespace."""


class HungError(QuestionError):
    """The process serves the local socket, and does not answer."""

    def __init__(self, pid: int, text: str) -> None:
        """Say so.

        Args:
            pid: of the process, in our pid namespace; 0 if it is in one that we do not see.
            text: for people.
        """
        super().__init__(text)
        self.pid = pid


@contextmanager
def understood(who: str = "the running process") -> Iterator[None]:
    """Decode an answer inside; one of another version may not be understood.

    Args:
        who: answered.

    Raises:
        QuestionError: it cannot be decoded.
    """
    try:
        yield
    except (msgspec.DecodeError, ValueError, KeyError, RuntimeError) as error:
        raise QuestionError(
            f"the answer of {who} is not understood ({error}): it may be of another version or "
            "build; use the command of that one, or restart the process"
        ) from error


class _Connection(http.client.HTTPConnection):
    """A connection to the local socket."""

    def __init__(self, name: str, timeout: float) -> None:
        super().__init__("steersman", timeout=timeout)
        self._name = name

    def ask(self, method: str, path: str, body: bytes | None) -> None:
        """Send a request to a process of root or of our own user."""
        check_server(self.sock, self._name)
        self.request(method, path, body)

    def check_answer(self, reply: http.client.HTTPResponse) -> None:
        """Do nothing: the server was checked before the question."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(f"\0{self._name}")


class _PortConnection(_Connection):
    """A connection to the local port of Windows; see host/local_port.py."""

    def __init__(self, file: Path, timeout: float) -> None:
        super().__init__("", timeout)
        self._file = file
        self._found = LocalPort(0, "")
        self._nonce = secrets.token_hex(16)

    def connect(self) -> None:
        try:
            found = find(self._file)
        except OSError as error:
            text = f"{self._file}: {error.strerror}; run the command as an administrator"
            raise QuestionError(text) from error
        if found is None:
            raise ConnectionRefusedError
        self._found = found
        self.sock = socket.create_connection(("127.0.0.1", found.port), self.timeout)

    def ask(self, method: str, path: str, body: bytes | None) -> None:
        proof = self._found.proof("question", self._nonce)
        self.request(method, path, body, {NONCE: self._nonce, PROOF: proof})

    def check_answer(self, reply: http.client.HTTPResponse) -> None:
        given = reply.headers.get(PROOF, "")
        if not hmac.compare_digest(given, self._found.proof("answer", self._nonce)):
            raise NotRunningError(
                "no steersman runs on this machine: its port is another program's"
            )


def check_server(sock: socket.socket, name: str = CONTROL) -> None:
    """Check whose process serves a connection to the local socket: anybody can bind its name first.

    Raises:
        QuestionError: it may be another program.
    """
    pid, user = peer(sock)
    if is_trusted(user):
        return
    try:
        # Root may believe a process without root that has CAP_NET_ADMIN, as steersman has.
        believed = os.geteuid() == 0 and pid > 0 and has_capability(CAP_NET_ADMIN, pid=pid)
    except OSError:
        believed = False
    if not believed:
        raise QuestionError(
            f"the local socket @{name} belongs to process {pid} of user {user}, which may not be "
            "steersman: ask as that user"
        )


class Client:
    """Asks the running process of this network namespace; calls block."""

    def __init__(
        self, name: str = CONTROL, timeout: float = _TIMEOUT, port_file: Path | None = None
    ) -> None:
        """Create a client; nothing is connected before a call.

        Args:
            name: of the abstract socket.
            timeout: seconds without a byte after which the process counts as unresponsive.
            port_file: names the port to ask instead, as on Windows.
        """
        self._name = name
        self._timeout = timeout
        if port_file is None and sys.platform == "win32":
            port_file = local_port.port_file()
        self._port_file = port_file

    def _connection(self) -> _Connection:
        if self._port_file is not None:
            return _PortConnection(self._port_file, self._timeout)
        return _Connection(self._name, self._timeout)

    def server_pid(self) -> int:
        """Return the pid of the process that serves the socket, in our pid namespace.

        It is 0 if no such process runs, or if it is in a pid namespace that we do not see.
        """
        connection = self._connection()
        try:
            connection.connect()
            return self._pid_of(connection.sock)
        except OSError:
            return 0
        finally:
            connection.close()

    def get(self, path: str) -> bytes:
        """Return the body of a page.

        Raises:
            NotRunningError: no process serves the socket.
            HungError: the process does not answer.
            QuestionError: it refuses.
        """
        with self._request("GET", path) as reply:
            return reply.read()

    def post(self, path: str, document: object) -> Iterator[Any]:
        """Send a request; yield the lines of the answer, decoded from JSON, as they come.

        A process that is killed may leave half a line, which is not part of the answer.
        """
        with self._request("POST", path, json.dumps(document).encode()) as reply:
            while (line := reply.readline()).endswith(b"\n"):
                with understood():
                    said = json.loads(line)
                yield said

    @contextmanager
    def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection()
        try:
            try:
                connection.connect()
            except ConnectionRefusedError as error:
                raise NotRunningError(
                    "no steersman runs in this network namespace: run the command on the node "
                    "or in steersman's pod"
                ) from error
            except BlockingIOError as error:  # as many clients as the socket takes wait already
                raise HungError(
                    0, "the running process accepts no connections: it is stopped, or hangs"
                ) from error
            connection.ask(method, path, body)
            self._wait(connection.sock, _IDLE if path in _COMPUTED else None)
            reply = connection.getresponse()
            connection.check_answer(reply)
            if reply.status != http.client.OK:
                text = reply.read().decode(errors="replace").strip()
                raise QuestionError(text or f"the running process answered {reply.status}")
            yield reply
        except TimeoutError as error:
            text = f"the running process did not answer within {self._timeout:g} s"
            raise HungError(0, text) from error
        except (ConnectionError, http.client.HTTPException) as error:
            raise QuestionError(
                "the running process closed the connection: the local socket serves root and the "
                "process's own user only"
            ) from error
        finally:
            connection.close()

    def _pid_of(self, sock: socket.socket) -> int:
        """Return the pid of the process at the other end; 0 if it cannot be seen."""
        return 0 if self._port_file is not None else peer(sock)[0]

    def _wait(self, sock: socket.socket, idle: int | None) -> None:
        """Wait for the first byte of an answer, and see meanwhile that the process works on it.

        Raises:
            HungError: it does not, or not in time.
        """
        pid = self._pid_of(sock)
        # 0: it is in another pid namespace.
        who = f"the running process (pid {pid})" if pid else "the running process"
        used, looks = -1, 0
        end = time.monotonic() + self._timeout
        while not _readable(sock, 0 if used < 0 else _LOOK):
            with suppress(OSError):  # it has ended, or cannot be seen: the socket tells
                now = activity(pid)
                if now.stopped:
                    raise HungError(pid, f"{who} does not answer: {now.stopped}")
                looks = 0 if now.used != used or now.state == "R" else looks + 1
                used = now.used
                if idle and looks >= idle:
                    text = "it has used no CPU time for "
                    raise HungError(
                        pid, f"{who} does not answer: {text}{looks * _LOOK:g} s, state {now.state}"
                    )
            used = max(used, 0)
            if time.monotonic() > end:
                raise HungError(pid, f"{who} did not answer within {self._timeout:g} s")


def _readable(sock: socket.socket, seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:  # select() fails for descriptors above 1,023
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def known_names(kind: str, client: Client | None = None) -> tuple[str, ...]:
    """Return the names of a kind that the running process knows; () if it cannot be asked.

    Args:
        kind: service, endpoint, pod, node or namespace.
        client: for tests.
    """
    try:
        return tuple(json.loads((client or Client(timeout=2.0)).get(f"/names?kind={kind}")))
    except (QuestionError, OSError, ValueError):
        return ()
