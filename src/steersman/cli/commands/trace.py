"""`steersman trace`: follow one packet through the kernel, beside what explain predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import NAMESPACE, Argument, Command, Example, option

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.modes.tracer import Tracer
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.config import UsageError  # noqa: PLC0415
    from steersman.host.exec import SubprocessExec  # noqa: PLC0415
    from steersman.operate.dump import mode_of  # noqa: PLC0415
    from steersman.operate.load import load_world  # noqa: PLC0415
    from steersman.operate.trace import make_tracer, trace_packet  # noqa: PLC0415
    from steersman.operate.trace_question import ask  # noqa: PLC0415

    values = parsed.values
    *client, to = parsed.arguments or ("",)
    if (to and values.get("to")) or (client and values.get("from")):
        raise UsageError("give the client and the destination once: as words or as flags")
    if not (to or values.get("to")):
        raise UsageError("give the destination: steersman trace shop/web:http, or 10.96.0.10:80")
    wait = bool(values.get("wait"))
    given = getattr(values.get("timeout"), "seconds", 0.0)
    world = await load_world(parsed)
    words = {
        "client": client[0] if client else str(values.get("from", "")),
        "to": to or str(values.get("to", "")),
        "netns": str(values.get("netns", "")),
        "wait": wait,
        "timeout": given or (60.0 if wait else 3.0),
    }
    question = await ask(world, str(values.get("namespace", "")), parsed.config, words)

    def make() -> Tracer:
        return make_tracer(world, mode_of(world, parsed.config, SubprocessExec()))

    return await trace_packet(world, question, make)


COMMAND = Command(
    name="trace",
    summary="follow a packet through the kernel, and compare with what explain predicts",
    description="""\
Send a packet from this node or from a pod on it, follow it through the rules of the kernel, and
print each step beside what `explain` predicts. The first difference is named, even if it is due to
a rule of another program, such as a firewall, Docker or kubelet. With --wait, follow the next
packet of real traffic instead.

The probe is a TCP connection that is closed at once, a datagram, or an SCTP INIT. Only the first
packet of that one connection is traced, and nothing stays in the kernel. This needs root.

Names are those of `explain`: shop/web:http, web.shop:80, shop/cart-1, node-a:30080, 10.96.0.10:80.
HANDLE is the number of the rule for `nft -a list`; for iptables-legacy, its place in the chain.""",
    arguments=(
        Argument(
            "FROM",
            "Client, as --from; may be left out.",
            completes="pod,service,endpoint",
        ),
        Argument("TO", "Destination, as --to.", completes="service,endpoint"),
    ),
    flags=(
        option(
            "from",
            "Client: the word node for this node, a pod on it, its address; with --wait also "
            "outside, or any address.",
            default="node",
            completes="pod",
        ),
        option(
            "to",
            "Destination: a Service with its port, or an address and port.",
            completes="service,endpoint",
        ),
        option(
            "netns",
            "Network namespace to send from: a path, a name of `ip netns`, or a pid. By default "
            "the one that has the client's address.",
            completes="file",
        ),
        option("wait", "Follow the next packet of real traffic.", kind="bool"),
        option(
            "timeout",
            "Time to wait for an answer (3s), or with --wait for the packet (1m).",
            kind="duration",
            default="0s",
        ),
        NAMESPACE,
    ),
    examples=(
        Example("steersman trace shop/web:http", "a connection from this node"),
        Example("steersman trace shop/cart-1 shop/web:http", "from a pod on this node"),
        Example("steersman trace outside :30080 --wait", "the next client of a port"),
        Example("steersman trace 10.96.0.10:53/udp -o json", "all steps, for a program"),
    ),
    answer=_answer,
    exit_codes=(
        (0, "The kernel does what explain predicts, and the connection works."),
        (1, "Something differs, nobody answers, or the packet is refused as predicted."),
        (2, "The packet could not be sent or traced."),
    ),
)
