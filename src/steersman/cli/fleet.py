"""What commands about several nodes have in common: the flags that say how to reach them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from steersman.cli.command import option
from steersman.operate.answer import Answer, QuestionError

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.ui.fleet import Fleet
    from steersman.ui.nodes import Finder

    View: TypeAlias = Callable[[Parsed, Fleet], Answer]

SELECTOR: Final = "app.kubernetes.io/name=steersman"
NODE_FLAGS: Final = (
    option(
        "node", "Nodes to ask, as NAME=URL of their state ports; may be repeated.", kind="strings"
    ),
    option("nodes-file", "File with a line NAME=URL for each node.", completes="file"),
    option("token-file", "File with the token of the nodes' state ports.", completes="file"),
    option(
        "ca-file",
        "Certificate authorities of nodes that serve https (default: the system's).",
        completes="file",
    ),
    option(
        "in-cluster",
        "Ask steersman's pods through the API server, with the service account of this pod.",
        kind="bool",
    ),
    option("selector", "Label of steersman's pods.", default=SELECTOR),
    option("pod-namespace", "Namespace of steersman's pods (default: all)."),
    option(
        "state-port",
        "State port of steersman's pods (default: their container port named state).",
        kind="uint32",
    ),
    option(
        "direct",
        "Ask steersman's pods at their own addresses, not through the API server.",
        kind="bool",
    ),
    option("state-https", "Whether these ports serve https.", kind="bool"),
)
"""Beside --kubeconfig, which means steersman's pods, asked through the API server."""
_OF_PODS: Final = ("selector", "pod-namespace", "state-port", "state-https", "direct")
_OF_OTHERS: Final = ("token-file", "ca-file", "kubeconfig-context", "config", *_OF_PODS)
"""What says how to ask other nodes, and means nothing for the process of this one."""
HOW: Final = """\
Which nodes: the process of this node by default, through its local socket. --node or --nodes-file
name the state ports of nodes. --kubeconfig (or --in-cluster) finds steersman's pods by their label
and asks them through the API server's proxy, with your own rights: list pods, and get and create
pods/proxy; with --direct it connects to the pods itself, and listing them is enough. State ports
need a token: --token-file."""


def finder_of(parsed: Parsed) -> Finder:
    """Return what finds the nodes that a command line means.

    Raises:
        UsageError: a flag would be ignored.
        QuestionError: flags contradict each other, or a file cannot be read.
        KubeconfigError: the API server's address or credentials are not usable.
    """
    from steersman.run.process.startup import cluster_access  # noqa: PLC0415 - not for --help
    from steersman.ui.nodes import FixedNodes, PodNodes, Token, read_urls  # noqa: PLC0415

    values = parsed.values
    words, file = values.get("node") or (), str(values.get("nodes-file") or "")
    assert isinstance(words, Sequence)
    token = Token(str(values.get("token-file") or ""))
    config = parsed.config
    access = config.client_connection.kubeconfig or values.get("master")
    if words or file:
        if access or values.get("in-cluster"):
            raise QuestionError(
                "--node and --nodes-file cannot be combined with --kubeconfig or --in-cluster"
            )
        _refuse(parsed, _OF_PODS, "is for steersman's pods: give --kubeconfig instead of --node")
        try:
            text = Path(file).read_text(encoding="utf-8") if file else ""
        except (OSError, ValueError) as error:
            raise QuestionError(f"--nodes-file {file}: {error}") from error
        urls = read_urls([str(word) for word in words], text, f"--nodes-file {file}")
        if not urls:
            raise QuestionError(f"--nodes-file {file} names no node")
        return FixedNodes(urls, token, str(values.get("ca-file") or ""))
    if access or values.get("in-cluster"):
        if not values.get("direct"):
            _refuse(parsed, ("ca-file",), "is for --direct, and for --node: leave it out")
        port = values.get("state-port") or 0
        assert isinstance(port, int)
        return PodNodes(
            cluster_access(config),
            token,
            selector=str(values.get("selector") or SELECTOR),
            namespace=str(values.get("pod-namespace") or ""),
            port=port,
            secure=bool(values.get("state-https")),
            direct=bool(values.get("direct")),
            ca_file=str(values.get("ca-file") or ""),
        )
    _refuse(
        parsed, _OF_OTHERS, "is for other nodes: give --kubeconfig, --in-cluster or --node, too"
    )
    return FixedNodes()


def _refuse(parsed: Parsed, names: Sequence[str], why: str) -> None:
    from steersman.config import UsageError  # noqa: PLC0415 - not for --help

    for name in names:
        if parsed.values.get(name):
            raise UsageError(f"--{name} {why}")


def asks_this_node(parsed: Parsed) -> bool:
    """Whether a command line is about the process of this node, and names no others."""
    values = parsed.values
    named = ("node", "nodes-file", "in-cluster", "master")
    return not (parsed.config.client_connection.kubeconfig or any(map(values.get, named)))


def ask_fleet(view: View) -> Callable[[Parsed], Coroutine[Any, Any, Answer]]:
    """Return what answers once each node has answered or failed."""

    async def answer(parsed: Parsed) -> Answer:
        from steersman.host.limits import raise_descriptor_limit  # noqa: PLC0415
        from steersman.ui.fleet import seen_once  # noqa: PLC0415

        raise_descriptor_limit()
        return view(parsed, await seen_once(finder_of(parsed)))

    return answer


def follow_fleet(view: View) -> Callable[[Parsed, float], AsyncIterator[Answer]]:
    """Return what answers again and again, from streams that stay open."""

    async def follow(parsed: Parsed, every: float) -> AsyncIterator[Answer]:
        from steersman.host.limits import raise_descriptor_limit  # noqa: PLC0415
        from steersman.ui.fleet import seen_again  # noqa: PLC0415

        raise_descriptor_limit()
        async for fleet in seen_again(finder_of(parsed), every):
            yield view(parsed, fleet)

    return follow
