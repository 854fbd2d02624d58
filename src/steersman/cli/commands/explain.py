"""`steersman explain`: what happens to a connection or to a Service, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from steersman.cli.command import Argument, Command, Example
from steersman.config.flags_upstream import Flag, Group
from steersman.operate.answer import Answer, Block, Line, QuestionError

if TYPE_CHECKING:
    from steersman.compile.trace import Flow
    from steersman.config import Parsed


class Explained(Answer, frozen=True, kw_only=True):
    """An explanation."""

    lines: tuple[str, ...]
    explanation: dict[str, Any]
    found: bool = True

    @property
    def exit_code(self) -> int:
        """1 if there is no such object."""
        return 0 if self.found else 1

    def blocks(self, wide: bool) -> Iterator[Block]:  # noqa: ARG002
        """Yield the lines."""
        yield from map(Line, self.lines)

    @property
    def data(self) -> Any:
        """The explanation as JSON types."""
        return self.explanation


async def _answer(parsed: Parsed) -> Answer:
    """Explain a Service, or a flow of the flags, on the plan of the current objects."""
    from steersman.compile.explain import explain_flow, explain_service  # noqa: PLC0415
    from steersman.model.names import ObjectName  # noqa: PLC0415
    from steersman.operate.load import load_world  # noqa: PLC0415

    service = parsed.arguments[0] if parsed.arguments else ""
    flow = None if service else _flow(parsed.values)
    namespace, _, name = service.partition("/")
    if service and not name:
        raise QuestionError(f"{service!r}: give the Service as NAMESPACE/NAME")
    world = await load_world(parsed)
    if flow is not None:
        made = explain_flow(world.plan, flow)
    else:
        made = explain_service(world.snapshot, world.plan, ObjectName(namespace, name))
    return Explained(
        source=world.origin.text,
        lines=tuple(made.text.splitlines()),
        explanation=made.data,
        found=made.found,
    )


def _flow(values: Mapping[str, object]) -> Flow:
    """Return the flow that --from, --to and --interface describe."""
    from steersman.compile.trace import Flow  # noqa: PLC0415
    from steersman.model.addresses import canonical_ip, split_host_port  # noqa: PLC0415
    from steersman.model.names import Protocol  # noqa: PLC0415
    from steersman.model.plan import SourceClass  # noqa: PLC0415

    text = str(values.get("to", ""))
    if not text:
        raise QuestionError("give a Service (NAMESPACE/NAME), or --to IP:PORT with --from")
    destination, _, word = text.partition("/")
    try:
        address, port = split_host_port(destination)
        protocol = Protocol((word or "tcp").upper())
    except ValueError as error:
        raise QuestionError(f"--to {text}: {error}") from error
    source: str | SourceClass | None = str(values.get("from", "external"))
    if source in tuple(SourceClass):
        source = SourceClass(source)
    elif (source := canonical_ip(given := str(source))) is None:
        raise QuestionError(f"--from {given}: give an address, pod, node or external")
    return Flow(source, address, port, protocol, str(values.get("interface", "")))


COMMAND = Command(
    name="explain",
    summary="explain what happens to a connection or to a Service, and why",
    description="Explains a Service, or what happens to a connection, rule by rule.",
    arguments=(Argument("NAMESPACE/SERVICE", "The Service to explain.", completes="service"),),
    flags=(
        Flag("from", "string", "external", Group.OWN, "Source: an address, pod, node or external."),
        Flag("to", "string", "", Group.OWN, "Destination: IP:PORT, IP:PORT/udp or IP:PORT/sctp."),
        Flag("interface", "string", "", Group.OWN, "Interface by which the packet arrives."),
    ),
    examples=(
        Example("steersman explain shop/web", "where a Service is served, and by which endpoints"),
        Example("steersman explain --from pod --to 10.96.0.10:80", "the way of a connection"),
    ),
    answer=_answer,
)
