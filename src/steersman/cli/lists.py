"""What the commands that list have in common: services, endpoints, nodeports."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from steersman.cli.command import NAMESPACE, Argument, Command, Example, option

if TYPE_CHECKING:
    from steersman.config import Parsed
    from steersman.operate.answer import Answer
    from steersman.operate.lists import Counter

_ARGUMENT: Final = Argument(
    "NAMESPACE[/NAME]", "Only this namespace, or this Service.", completes="service"
)
FLAGS: Final = (
    NAMESPACE,
    option("name", "Only Services of this name."),
    option("address", "Only those with this frontend or endpoint IP."),
    option("port", "Only those with this port, node port or target port."),
    option("pod", "Only those of this pod, by name or IP.", completes="pod"),
    option("rates", "Count for a second; show connections per second.", kind="bool"),
)
_COUNTS: Final = """\
Connections are counted from the moment the Service was first served, if the mode of the running
process can count them; --rates and --watch add new connections per second."""
_EXIT_CODES: Final = (
    (0, "The list was printed."),
    (1, "Nothing matches the filters."),
    (2, "It could not be read."),
)


def list_command(
    name: str, summary: str, description: str, *examples: Example, method: str = ""
) -> Command:
    """Return the command that shows one of the Lists, by the name of its method."""
    return Command(
        name=name,
        summary=summary,
        description=f"{description}\n\n{_COUNTS}",
        arguments=(_ARGUMENT,),
        flags=FLAGS,
        examples=examples,
        answer=_list_answer(method or name),
        watch=True,
        exit_codes=_EXIT_CODES,
    )


def _list_answer(method: str) -> Callable[[Parsed], Coroutine[Any, Any, Answer]]:
    """Return what answers with one of the Lists, by the name of its method.

    With --watch it is called again and again, and counts connections since the last call.
    """
    counters: list[Counter] = []

    async def answer(parsed: Parsed) -> Answer:
        import msgspec  # noqa: PLC0415 - only for this answer, as the others

        from steersman.operate import lists  # noqa: PLC0415

        wanted = lists.filter_of(parsed)
        counters[:] = counters or [lists.Counter()]
        world, made_of = await lists.read_lists(parsed, counters[0])
        made: Answer = getattr(made_of, method)(wanted)
        return msgspec.structs.replace(made, source=world.origin.text)

    return answer
