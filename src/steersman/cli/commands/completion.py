"""`steersman completion`: print shell completion."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.cli.command import Argument, Command, Example


def _main(argv: Sequence[str]) -> int:
    from steersman.cli.completion import SHELLS, script  # noqa: PLC0415 - it imports all commands
    from steersman.config import UsageError  # noqa: PLC0415 - only a failure needs it

    shell = argv[0] if len(argv) == 1 else ""
    if shell not in SHELLS:
        raise UsageError(f"give the shell: {', '.join(SHELLS)}")
    print(script(shell), end="")
    return 0


COMMAND = Command(
    name="completion",
    summary="print shell completion: bash, zsh or fish",
    description=(
        "Print a script that completes commands, flags and choices, and the names of Services,\n"
        "endpoints, pods and nodes that the running process knows."
    ),
    group="Tools",
    arguments=(Argument("SHELL", "bash, zsh or fish.", completes="shell", required=True),),
    examples=(
        Example("source <(steersman completion bash)", "complete in this bash"),
        Example("steersman completion fish | source", "complete in this fish"),
        Example("steersman completion zsh > ${fpath[1]}/_steersman", "complete in every new zsh"),
    ),
    main=_main,
)
