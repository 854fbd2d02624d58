"""Ways to the processes on the nodes, and how to find them.

    the local socket       one node: this one
    a URL and a token      the port of `steersman.state.bindAddress` on each node
    the API server         its proxy of pods, with the operator's own kubeconfig; the pods are found
                           by their label, so nodes come and go

A Way sends requests; a Finder tells which Ways there are. The token goes in a header of ours,
because the API server keeps `Authorization` to itself.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import NamedTuple, Protocol
from urllib.parse import quote, urlsplit

import msgspec

from steersman.host.connect import connect_tcp
from steersman.host.files import read_file
from steersman.host.peers import CONTROL
from steersman.model.addresses import join_host_port, without_password
from steersman.model.kube import Pod
from steersman.operate.answer import QuestionError
from steersman.operate.client import check_server
from steersman.operate.connectivity.cluster import SELECTOR
from steersman.source.client import ApiClient, Connections
from steersman.source.http import HttpClient, Response
from steersman.source.http_connection import HttpError
from steersman.source.kubeconfig import ClusterAccess, Material
from steersman.source.pace import Backoff, Timing
from steersman.source.stats import SourceStats
from steersman.source.tls import TlsContexts, TlsError
from steersman.source.wire import ApiError, shown

TOKEN_HEADER = "X-Steersman-Token"
PORT_NAME = "state"
"""Name of the container's port that serves the state."""
_MAX_TOKEN = 64 << 10
_CONNECT = 10.0
_ANSWER = 30.0
"""Seconds until the next bytes of a list."""
_RELIST = 30.0
"""Seconds between two lists of pods."""


class NodeError(QuestionError):
    """A node cannot be asked; the message says why, and what to do."""


class Way(Protocol):
    """How to ask the process of one node."""

    @property
    def name(self) -> str:
        """Name of the node; "" if only its process knows it."""
        ...

    @property
    def address(self) -> str:
        """Where it is asked, for people."""
        ...

    def open(
        self, path: str, *, idle: float, body: object = None
    ) -> AbstractAsyncContextManager[Response]:
        """Send a GET request, or POST a document; give the response with its body unread.

        Args:
            path: of the page, with its query.
            idle: seconds without a byte after which the node counts as silent.
            body: the document.

        Raises:
            NodeError: the node cannot be reached, or refuses; also out of the caller's block.
        """
        ...


class Finder(Protocol):
    """Tells which nodes there are."""

    async def follow(self, use: Callable[[Sequence[Way], str], None]) -> None:
        """Call `use` with all Ways whenever they change, and a problem or ""; run until cancelled.

        Ways that are equal to earlier ones are the same.
        """
        ...


class Token:
    """The token of the nodes: a text, or a file that is read again for each request."""

    def __init__(self, file: str = "", text: str = "") -> None:
        """Name the file, or give the token itself."""
        self._file = file
        self._text = text

    def headers(self) -> list[tuple[str, str]]:
        """Return the header with the token; none without one.

        Raises:
            NodeError: the file cannot be read.
        """
        text = self._text
        if self._file:
            try:
                text = read_file(self._file, _MAX_TOKEN).decode().strip()
            except (OSError, ValueError) as error:
                raise NodeError(f"--token-file: {error}") from error
        return [(TOKEN_HEADER, text)] if text else []


# Direct ways


async def _dial_local(_host: str, _port: int) -> socket.socket:
    """Connect to the local socket, and check whose process answers there."""
    if sys.platform == "win32":
        raise NodeError("this needs a local socket, which Windows does not have; use `status`")
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, f"\0{CONTROL}")
        check_server(sock)
    except QuestionError as error:
        sock.close()
        raise NodeError(str(error)) from error
    except BaseException:
        sock.close()
        raise
    return sock


class DirectWay(msgspec.Struct, frozen=True):
    """Asks a process at a URL, or on the local socket."""

    name: str
    url: str
    """Without a final slash."""
    client: HttpClient
    token: Token
    tls: TlsContexts
    local: bool = False

    @property
    def address(self) -> str:
        """The URL without a password."""
        return "the local socket" if self.local else without_password(self.url)

    @asynccontextmanager
    async def open(self, path: str, *, idle: float, body: object = None) -> AsyncIterator[Response]:
        """Send a request: see Way."""
        try:
            headers = self.token.headers()
            content = None
            if body is not None:
                headers.append(("Content-Type", "application/json"))
                content = msgspec.json.encode(body)
            response = await self.client.request(
                self.url + path,
                headers=headers,
                body=content,
                patience=idle,
                tls=self.tls.current(None) if self.url.startswith("https:") else None,
            )
        except TlsError as error:
            raise NodeError(str(error)) from error
        except HttpError as error:
            raise NodeError(self._why(error)) from error
        try:
            if response.status != 200:
                text = shown((await response.read())[:4096].decode(errors="replace"))
                if response.status == 401:
                    text = f"{self.address} refuses the token: give the node's with --token-file"
                raise NodeError(text or f"{self.address} answers {response.status}")
            yield response
        except HttpError as error:
            raise NodeError(self._why(error)) from error
        finally:
            response.close()

    def _why(self, error: HttpError) -> str:
        if error.reason == "connect" and self.local:
            return (
                "no steersman runs in this network namespace; give --node, --nodes-file or "
                "--kubeconfig, or start this on a node"
            )
        return shown(str(error))


# A node answers with small pages, which are not worth compressing.
_PLAIN = (("Accept-Encoding", "identity"),)


class FixedNodes:
    """Nodes that the command line names; without any, the process of this node."""

    def __init__(
        self, urls: Mapping[str, str] | None = None, token: Token | None = None, ca_file: str = ""
    ) -> None:
        """Name the nodes.

        Args:
            urls: URLs of the nodes by name; none for the local socket.
            token: that of the nodes.
            ca_file: certificate authorities of the nodes; "" for those of the system.
        """
        self._urls = urls or {}
        self._token = token or Token()
        self._ca = Material(path=ca_file) if ca_file else Material()

    async def follow(self, use: Callable[[Sequence[Way], str], None]) -> None:
        """Tell the nodes once."""
        local = not self._urls
        # The nodes have one authority, so one TLS context is enough.
        tls = TlsContexts(ClusterAccess(tuple(self._urls.values()) or ("",), ca=self._ca))
        dial = _dial_local if local else connect_tcp
        async with aclosing(HttpClient(_PLAIN, _CONNECT, dial)) as client:
            urls = self._urls or {"": "http://local"}
            # A URL that was given without a name is its own key.
            ways = [
                DirectWay("" if name == url else name, url, client, self._token, tls, local)
                for name, url in urls.items()
            ]
            use(ways, "")
            await asyncio.Event().wait()  # the client is open for as long as this runs


# Through the API server


_PODS = msgspec.json.Decoder(list[Pod])


class _Cluster(NamedTuple):
    """What all pods of a cluster are asked with."""

    client: ApiClient
    token: Token
    secure: bool
    """Whether the pods serve https."""
    http: HttpClient
    tls: TlsContexts
    direct: bool
    """Whether the pods are asked at their own addresses."""


class PodWay(msgspec.Struct, frozen=True):
    """Asks a pod through the API server's proxy."""

    name: str
    namespace: str
    pod: str
    port: int
    """0 if it is not known."""
    cluster: _Cluster

    @property
    def address(self) -> str:
        """The pod."""
        return f"pod {self.namespace}/{self.pod}, through the API server"

    @asynccontextmanager
    async def open(self, path: str, *, idle: float, body: object = None) -> AsyncIterator[Response]:
        """Send a request: see Way."""
        if not self.port:
            raise NodeError(
                f"pod {self.namespace}/{self.pod} has no container port named {PORT_NAME}: let it "
                "serve its state (docs/ui.md), or give --state-port"
            )
        namespace, pod = quote(self.namespace, safe=""), quote(self.pod, safe="")
        scheme = "https:" if self.cluster.secure else ""
        proxy = f"/api/v1/namespaces/{namespace}/pods/{scheme}{pod}:{self.port}/proxy"
        try:
            async with self.cluster.client.proxied(
                proxy + path, {}, idle, headers=self.cluster.token.headers(), body=body
            ) as response:
                yield response
        except ApiError as error:
            text = str(error)
            if error.status == 401:
                text += "; the node's token is given with --token-file"
            elif error.status == 403:
                text += "; the right to get (or create) pods/proxy is needed"
            raise NodeError(text) from error


class PodNodes:
    """The pods of a cluster that have steersman's label."""

    def __init__(
        self,
        access: ClusterAccess,
        token: Token,
        *,
        selector: str = SELECTOR,
        namespace: str = "",
        port: int = 0,
        secure: bool = False,
        direct: bool = False,
        ca_file: str = "",
        timing: Timing | None = None,
    ) -> None:
        """Configure; nothing is connected before `follow`.

        Args:
            access: the API server, and the operator's credentials.
            token: that of the nodes.
            selector: labels of the pods.
            namespace: of the pods; "" for all.
            port: of the pods; 0 for the container port named PORT_NAME.
            secure: whether the pods serve https.
            direct: whether they are asked at their own addresses, not through the API server.
            ca_file: then, certificate authorities of the pods; "" for those of the system.
            timing: clock, sleep and delays.
        """
        self._access = access
        self._token = token
        self._selector = selector
        self._port = port
        self._secure = secure
        self._direct = direct
        self._tls = TlsContexts(
            ClusterAccess(("",), ca=Material(path=ca_file) if ca_file else Material())
        )
        self._timing = timing or Timing(connect=_CONNECT, answer=_ANSWER)
        inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
        self._path = f"/api/v1{inside}/pods"

    async def follow(self, use: Callable[[Sequence[Way], str], None]) -> None:
        """List the pods again and again: their changes are rare, and a watch is one more state."""
        backoff = Backoff(self._timing)
        last: Sequence[Way] = ()
        api = Connections(self._access, self._timing)
        async with aclosing(api), aclosing(HttpClient(_PLAIN, _CONNECT)) as http:
            client = ApiClient(api, SourceStats(), self._timing)
            cluster = _Cluster(client, self._token, self._secure, http, self._tls, self._direct)
            while True:
                try:
                    pods = await client.list_all(
                        "Pod", self._path, _PODS, {"labelSelector": self._selector}
                    )
                except ApiError as error:
                    use(last, f"the pods of steersman cannot be listed: {error}")
                    await self._timing.sleep(backoff.next(error.retry_after))
                    continue
                backoff.reset()
                last = ways_of(pods, cluster, self._port)
                problem = ""
                if not last:
                    problem = f"no pod with the label {self._selector} runs"
                use(last, problem)
                await self._timing.sleep(_RELIST)


def ways_of(pods: Sequence[Pod], cluster: _Cluster, port: int) -> list[Way]:
    """Return the Ways to the pods that run, one for each node.

    Args:
        pods: all of them; during a rollout, a node may have two.
        cluster: what they are asked through.
        port: the port; 0 for the named one of each pod.
    """
    by_node: dict[str, Pod] = {}
    for pod in pods:
        if pod.spec.node_name and pod.status and pod.status.phase == "Running":
            other = by_node.get(pod.spec.node_name)
            if other is None or other.metadata.deletion_timestamp is not None:
                by_node[pod.spec.node_name] = pod
    ways: list[Way] = []
    for node, pod in sorted(by_node.items()):
        ports = (each for one in pod.spec.containers or () for each in one.ports or ())
        named = (each.container_port for each in ports if each.name == PORT_NAME)
        number, address = port or next(named, 0), pod.status.pod_ip if pod.status else ""
        if cluster.direct and number and address:
            scheme = "https" if cluster.secure else "http"
            url = f"{scheme}://{join_host_port(address, number)}"
            ways.append(DirectWay(node, url, cluster.http, cluster.token, cluster.tls))
        else:
            ways.append(PodWay(node, pod.metadata.namespace, pod.metadata.name, number, cluster))
    return ways


def read_urls(words: Sequence[str], text: str = "", origin: str = "--nodes-file") -> dict[str, str]:
    """Return URLs of nodes by name.

    Args:
        words: `NAME=URL` each, or a URL alone (the node then tells its name).
        text: more of them, a line each; empty lines and those with `#` are comments.
        origin: where the text is from, for messages.

    Raises:
        NodeError: one of them is malformed, or named twice.
    """
    lines = [("--node", word) for word in words]
    for number, line in enumerate(text.splitlines(), 1):
        if stripped := line.partition("#")[0].strip():
            lines.append((f"{origin} line {number}", stripped))
    found: dict[str, str] = {}
    for where, word in lines:
        name, equals, url = word.partition("=")
        if not equals or "://" in name:  # a `=` may be in the URL itself
            name, url = "", word
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            shown_url = without_password(url)
            raise NodeError(f"{where}: {shown_url!r} is not a URL such as http://10.0.0.1:10259")
        key = name or url.rstrip("/")
        if key in found:
            raise NodeError(f"{where}: {key} is given twice")
        found[key] = url.rstrip("/")
    return found
