"""`steersman completion`: print shell completion."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.cli.command import Argument, Command, Example, command_help, command_names


def _main(argv: Sequence[str]) -> int:
    from steersman.cli.main import CommandError  # noqa: PLC0415 - it imports this module
    from steersman.config.help import SHELLS, completion  # noqa: PLC0415

    if set(argv) & {"--help", "-h"}:
        print(command_help(COMMAND))
        return 0
    shell = argv[0] if argv else ""
    if shell not in SHELLS:
        raise CommandError(f"give the shell: {', '.join(SHELLS)}")
    print(completion(shell, program="steersman", commands=command_names()))
    return 0


COMMAND = Command(
    name="completion",
    summary="print shell completion: bash, zsh or fish",
    group="Tools",
    arguments=(Argument("SHELL", "bash, zsh or fish.", completes="shell", required=True),),
    examples=(Example("source <(steersman completion bash)", "complete in this shell"),),
    main=_main,
)
