"""`steersman explain`: what happens to a connection, a Service or a pod, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import NAMESPACE, Argument, Command, Example, option

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.operate.explain import Question, explain  # noqa: PLC0415
    from steersman.operate.load import load_world  # noqa: PLC0415

    values = parsed.values
    question = Question(
        what=parsed.arguments[0] if parsed.arguments else "",
        client=str(values.get("from", "")),
        to=str(values.get("to", "")),
        node=str(values.get("node", "")),
        interface=str(values.get("interface", "")),
        namespace=str(values.get("namespace", "")),
        problems=bool(values.get("problems")),
    )
    question.check()
    return await explain(await load_world(parsed), question, parsed.config)


COMMAND = Command(
    name="explain",
    summary="explain what happens to a connection, a Service or a pod, and why",
    description="""\
Explain where connections go and by which rules, where a Service is served and why its endpoints are
used or not, and which Services use a pod. The answer is what the rules of this program do; `trace`
shows what the kernel does.

Write names as shop/web, web.shop, web.shop.svc.cluster.local, or web with its namespace in -n.
Append a port, as :80 or :http, and a protocol, as /udp or /sctp. If a name is ambiguous, give its
kind: pod/shop/web-1, svc/web, node/node-a. :30080 alone is a node port of this node. Without a
port, all ports are explained.""",
    arguments=(Argument("NAME", "The Service, pod or address to explain.", completes="service"),),
    flags=(
        option(
            "from",
            "Client: a pod, a node, an address, or the words pod, node and outside.",
            completes="pod,node",
        ),
        option(
            "to",
            "Destination: a Service, pod, node or address, with or without a port.",
            completes="service,endpoint,pod,node",
        ),
        option(
            "node",
            "The node that handles the connection first, or whose view of a Service is shown.",
            completes="node",
        ),
        option("problems", "All Services in trouble, worst first.", kind="bool"),
        option("interface", "Interface by which the packets arrive."),
        NAMESPACE,
    ),
    examples=(
        Example("steersman explain shop/web", "where a Service is served, and by which endpoints"),
        Example("steersman explain --from shop/cart-1 --to shop/web:http", "one connection"),
        Example("steersman explain --from outside --to node-a:30080", "a node port"),
        Example("steersman explain pod/shop/web-1", "which Services use a pod"),
        Example("steersman explain --from shop/cart-1", "what a pod reaches"),
        Example("steersman explain --problems", "all Services in trouble, worst first"),
    ),
    answer=_answer,
    watch=True,
    exit_codes=(
        (0, "All is well."),
        (1, "A connection is dropped or rejected, or a Service has errors."),
        (2, "The question could not be answered, or not yet: the process has just started."),
    ),
)
