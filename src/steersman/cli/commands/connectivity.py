"""`steersman connectivity`: try Services of our own by real packets."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from steersman.cli.command import CLUSTER, Argument, Command, Example, option
from steersman.operate.answer import QuestionError

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    # What was made is removed, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    values, image = parsed.values, str(parsed.values.get("image") or "")
    kubeconfig = parsed.config.client_connection.kubeconfig
    if kubeconfig or values.get("master") or values.get("in-cluster"):
        from steersman.operate.connectivity.cluster import try_cluster  # noqa: PLC0415
        from steersman.run.process.startup import cluster_access  # noqa: PLC0415

        if values.get("manifests"):
            raise QuestionError("give --manifests for this node, or --kubeconfig for a cluster")
        return await try_cluster(cluster_access(parsed.config), parsed.arguments, image)
    if parsed.arguments or image:
        raise QuestionError("NODE and --image are for a cluster: give --kubeconfig, too")
    from steersman.operate.connectivity.node import try_connections  # noqa: PLC0415

    return await try_connections(parsed.config)


COMMAND = Command(
    name="connectivity",
    summary="try Services of its own: cluster IP, node port, hairpin, affinity, policies",
    description="""\
Make pods and Services, and connect: from pods and from nodes to a cluster IP by TCP and UDP, to
node ports, from a pod to itself by its Service, with session affinity, and with the policies Local;
for IPv4 and IPv6, as far as they are served. If "pod to pod" fails, which needs no Service, look at
the network of pods, firewalls and network policies first. All that was made is removed at the end,
also after Ctrl-C.

With --kubeconfig (or --in-cluster), in a cluster: three pods on each NODE, by default on the first
20 that are ready, in the namespace steersman-connectivity. Whatever proxy serves there is tried.
The image needs python3; by default it is that of steersman's pods. If this command was killed, the
pods end after ten minutes, and the next run deletes the namespace. Rights: list nodes and pods;
get, create and delete namespaces; create services and pods.

Otherwise, on this node alone, as root: with network namespaces as pods, a client outside, and
Services in a directory of manifests that the running process watches.""",
    arguments=(Argument("NODE", "Nodes of the cluster to try.", repeated=True),),
    flags=(
        option("image", "Image of the pods, with python3 (default: that of steersman's pods)."),
        option(
            "in-cluster", "Try this pod's cluster, with the rights of its account.", kind="bool"
        ),
    ),
    examples=(
        Example("steersman connectivity", "does this node serve as it should?"),
        Example("steersman connectivity --kubeconfig ~/.kube/config", "does the cluster?"),
        Example("steersman connectivity -o json", "for a script"),
    ),
    exit_codes=(
        (0, "Nothing that was tried has failed."),
        (1, "A connection failed, or something could not be removed."),
        (2, "Nothing could be tried; the message says why."),
    ),
    answer=_answer,
    takes=CLUSTER | {"manifests"},
)
