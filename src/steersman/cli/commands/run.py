"""`steersman run`: watch Services and program this node's kernel."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steersman import __version__
from steersman.cli.command import Command
from steersman.cli.failures import CommandError, expected_errors, report

if TYPE_CHECKING:
    from steersman.config import Parsed


def run_words(argv: Sequence[str], program: str = "steersman run") -> int:
    """Run the daemon, or do what a flag asks for instead; return the exit status."""
    from steersman.config import UsageError, help_text, parse_command_line, to_yaml  # noqa: PLC0415
    from steersman.run.process.klog import ProcessLog  # noqa: PLC0415

    parsed = parse_command_line(argv)
    if parsed.help:
        print(help_text(program))
        return 0
    if parsed.version:
        print(__version__ if parsed.version == "raw" else f"steersman {__version__}")
        return 0
    config = parsed.config
    if path := parsed.write_config_to:
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(to_yaml(config))
        except OSError as error:
            raise CommandError(f"--write-config-to {path}: {error.strerror}") from error
        return 0
    patterns = [(each.file_pattern, each.verbosity) for each in config.logging.vmodule]
    logs = ProcessLog(config.logging.format or "text", config.logging.verbosity, patterns)
    for warning in parsed.warnings:
        logging.getLogger("steersman").warning("%s", warning)
    if parsed.cleanup:
        from steersman.cli.commands.cleanup import remove  # noqa: PLC0415

        return remove(config, dry_run=parsed.dry_run)
    if parsed.init_only:
        if parsed.dry_run:
            raise UsageError("--dry-run shows no settings of the kernel: leave out --init-only")
        from steersman.run.process.startup import initialize  # noqa: PLC0415

        asyncio.run(initialize(config))
        return 0
    if parsed.dry_run:
        return dry_run(parsed, program)
    from steersman.host.facts import hostname  # noqa: PLC0415
    from steersman.run.process.assemble import run_daemon  # noqa: PLC0415
    from steersman.run.process.event_loop import MeasuredLoop, run_to_end  # noqa: PLC0415
    from steersman.run.process.instance import Instance, MachineInstance, NodeLock  # noqa: PLC0415
    from steersman.run.process.machine import Machine  # noqa: PLC0415

    instance: NodeLock
    if sys.platform == "win32":  # another loop waits for subprocesses there; it is not measured
        instance, loop_factory = MachineInstance(), None
    else:
        instance = Instance(config.mode, hostname(), take_over=config.steersman.take_over)
        loop_factory = MeasuredLoop
    daemon = run_daemon(parsed, logs, Machine(instance=instance))
    name = program.split(maxsplit=1)[0]
    runner = asyncio.Runner(loop_factory=loop_factory)
    return run_to_end(runner, daemon, lambda error: report(error, name))


def dry_run(parsed: Parsed, program: str) -> int:
    """Print the changes that a sync would make; return 1 if there are any, 2 if it is unknown."""
    from steersman.cli.output import print_answer  # noqa: PLC0415
    from steersman.operate.plan_change import plan_change  # noqa: PLC0415

    try:
        answer = asyncio.run(plan_change(parsed, objects=True, exact=True))
    except expected_errors() as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print_answer(answer, "text")
    return answer.exit_code


COMMAND = Command(
    name="run",
    summary="watch Services and program this node's kernel",
    group="Run",
    main=run_words,
    own_help=True,
)
