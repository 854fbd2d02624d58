"""`steersman doctor`: find out why a Service does not work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import NAMESPACE, Argument, Command, Example, option

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.operate.doctor.ask import Asked, doctor  # noqa: PLC0415

    def flag(name: str) -> str:
        return str(parsed.values.get(name, ""))

    asked = Asked(
        parsed.arguments[0] if parsed.arguments else "",
        flag("from"),
        flag("to"),
        flag("from-pod"),
        flag("namespace"),
        not parsed.values.get("no-dial"),
    )
    return await doctor(parsed, asked)


COMMAND = Command(
    name="doctor",
    summary="check a Service, a connection or the node, and name the likely cause of trouble",
    description=(
        "Run every check that applies, all at the same time, within 15 s: the Service and its\n"
        "endpoints, the process, the rules in the kernel, other firewalls, sysctls, bridges,\n"
        "conntrack, the way to the endpoints, and real connections to them and to the Service,\n"
        "from the node, from pods and from a client outside, which exists only meanwhile. Each\n"
        "check has a verdict (error, warning, unknown, notice, ok, skipped), evidence and a\n"
        "remedy; the likely cause comes first. No settings are changed. Without a Service, check\n"
        "the node.\n\n"
        "Run it as root on the node, or in steersman's pod. Elsewhere, with --manifests or\n"
        "--kubeconfig, the checks that look at the machine are skipped."
    ),
    arguments=(
        Argument("SERVICE", "NAMESPACE/NAME, or with a port: NAMESPACE/NAME:PORT.", "service"),
    ),
    flags=(
        option("from", "The client: an address, a pod, a node, external.", completes="pod"),
        option("to", "The destination: a Service or IP:PORT[/udp].", completes="service,endpoint"),
        option("from-pod", "A pod of this node, to connect from there, too.", completes="pod"),
        option("no-dial", "Make no connections to Services and endpoints.", kind="bool"),
        NAMESPACE,
    ),
    examples=(
        Example("steersman doctor", "is this node as it should be?"),
        Example("steersman doctor shop/web", "why does this Service not answer?"),
        Example(
            "steersman doctor shop/web --from-pod shop/shell-1",
            "the same, with connections from a pod",
        ),
        Example(
            "steersman doctor --from 198.51.100.7 --to 192.0.2.10:30080",
            "why does a client not reach a node port?",
        ),
    ),
    watch=True,
    exit_codes=(
        (0, "No check found an error."),
        (1, "Something is wrong."),
        (2, "The checks could not be run."),
        (3, "Nothing wrong was found, but some checks did not end or need more rights."),
    ),
    answer=_answer,
)
