"""`steersman connectivity`: try Services of our own on this node, by real packets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import Command, Example

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.operate.connectivity import try_connections  # noqa: PLC0415

    return await try_connections(parsed.config)


COMMAND = Command(
    name="connectivity",
    summary="try Services of its own on this node: cluster IP, node port, hairpin, policies",
    description="""\
Make three pods (network namespaces) and a client outside on this node, have the running process
serve Services of their own, and connect: from a pod and from the node to a cluster IP by TCP and
UDP, from outside to a node port, from a pod to itself by its Service, with session affinity, and
with the policies Local; for IPv4 and IPv6, as far as the node serves them.

The Services are a file in a directory of manifests that the process watches: a process that reads
an API server cannot be tried. Pods and file are removed at the end, also after Ctrl-C. If this
command was killed, the kernel removes the pods, and the next run the file. This needs root.""",
    examples=(
        Example("steersman connectivity", "does this node serve as it should?"),
        Example("steersman connectivity -o json", "for a script"),
    ),
    exit_codes=(
        (0, "Nothing that was tried has failed."),
        (1, "A connection failed."),
        (2, "Nothing could be tried; the message says why."),
    ),
    answer=_answer,
    process_only=True,
)
