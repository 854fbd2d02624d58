"""`steersman dump`: what the kernel has for a Service, compared with the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steersman.cli.command import NAMESPACE, Argument, Command, Example

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer


async def _answer(parsed: Parsed) -> Answer:
    from steersman.operate.dump import dump_service, find_service  # noqa: PLC0415
    from steersman.operate.load import load_world  # noqa: PLC0415

    world = await load_world(parsed)
    name = find_service(world, parsed.arguments[0], str(parsed.values.get("namespace") or ""))
    return await dump_service(world, name, parsed.config)


COMMAND = Command(
    name="dump",
    summary="show what the kernel has for a Service, in the words of the mode's tool",
    description="""\
Read the kernel of this machine, and print what it has for a Service: rules as iptables-save prints
them, elements and chains as nft, virtual servers as ipvsadm, ipset entries, entries of eBPF maps,
or the listening sockets of the process and the rules that lead there. A heading says what the
lines below it are for. Lines that differ from the plan are marked: `-` is missing in the kernel,
`+` is there although no plan asks for it. This needs root, and changes nothing. On a node where
rules change all the time, a line says how often they did while they were read.

The plan is that of the running process. With --manifests or an API server, it is the plan for
the mode that --proxy-mode names.""",
    arguments=(
        Argument(
            "SERVICE",
            "NAMESPACE/NAME, or any other name of it.",
            completes="service",
            required=True,
        ),
    ),
    flags=(NAMESPACE,),
    examples=(
        Example("steersman dump shop/web", "the rules of a Service, each with its purpose"),
        Example("steersman dump shop/web -o json", "the same for a script"),
    ),
    exit_codes=(
        (0, "The kernel has what the plan says."),
        (1, "Something is missing, or unexpected."),
        (2, "The Service is not served, or the kernel cannot be read."),
    ),
    answer=_answer,
)
