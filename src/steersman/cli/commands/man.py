"""`steersman man`: print a man page."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.cli.command import Argument, Command, Example, find_command


def _main(argv: Sequence[str]) -> int:
    from steersman.cli.main import CommandError  # noqa: PLC0415 - it imports this module
    from steersman.cli.man import command_page, overview_page  # noqa: PLC0415

    if not argv:
        print(overview_page(), end="")
        return 0
    try:
        page = command_page(find_command(argv[0]))
    except KeyError as error:
        raise CommandError(f"there is no command {argv[0]!r}") from error
    print(page, end="")
    return 0


COMMAND = Command(
    name="man",
    summary="print the man page of steersman or of a command",
    description="Print the man page of steersman, or of one of its commands.",
    group="Tools",
    arguments=(Argument("COMMAND", "The command; none for the overview.", completes="command"),),
    examples=(Example("steersman man explain | man -l -", "read the page of a command"),),
    main=_main,
)
