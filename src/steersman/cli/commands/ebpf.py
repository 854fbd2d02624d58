"""`steersman ebpf`: print the tables of the ebpf mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steersman.cli.command import Argument, Command, Example
from steersman.modes.specs import SPECS

_TABLES: Final = SPECS["ebpf"].dumps


def _main(argv: Sequence[str]) -> int:
    from steersman.modes.registry import dump  # noqa: PLC0415 - not for --help, as the others
    from steersman.operate.answer import QuestionError  # noqa: PLC0415

    if len(argv) != 2 or argv[0] != "dump" or argv[1] not in _TABLES:
        raise QuestionError(f"give one of: steersman ebpf dump {', '.join(_TABLES)}")
    try:
        for line in dump("ebpf", argv[1]):
            print(line)
    except FileNotFoundError as error:
        raise QuestionError("the ebpf mode does not run here: nothing is pinned") from error
    except PermissionError as error:
        raise QuestionError("the maps of the ebpf mode cannot be read: this needs root") from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise QuestionError(error.strerror or str(error)) from error
    return 0


COMMAND = Command(
    name="ebpf",
    group="Tools",
    summary=f"dump {', '.join(_TABLES[:-1])} or {_TABLES[-1]} of the ebpf mode",
    description="""\
Print a table that the programs of the ebpf mode use, a line for each entry. The tables are pinned
below /sys/fs/bpf, also while no process runs. This needs root.""",
    arguments=(
        Argument("dump", "This word.", required=True),
        Argument("|".join(_TABLES), "The table.", required=True),
    ),
    examples=(Example("steersman ebpf dump counters", "what the programs have counted"),),
    main=_main,
)
