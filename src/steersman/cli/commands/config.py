"""`steersman config`: check a configuration file, or show the configuration in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from steersman import __version__
from steersman.cli.command import Argument, Command, Example, option
from steersman.cli.failures import CommandError

_OUTPUT: Final = option(
    "output", "yaml or json.", default="yaml", short="o", choices=("yaml", "json")
)
_STRICT: Final = option(
    "strict", "Treat warnings as errors, and refuse modes that upstream lacks.", kind="bool"
)


def _main(argv: Sequence[str]) -> int:
    from steersman.config import (  # noqa: PLC0415
        ConfigError,
        UsageError,
        check_config,
        parse_command_line,
        read_file,
        show_config,
    )

    if argv[:1] not in (["check"], ["show"]):
        raise UsageError("give `check FILE` or `show`")
    checks = argv[0] == "check"
    flags = (_STRICT,) if checks else (_OUTPUT,)
    parsed = parse_command_line(argv[1:], extra=flags, allow_arguments=checks)
    if parsed.version:
        print(f"steersman {__version__}")
        return 0
    if checks:
        if len(parsed.arguments) != 1 or parsed.values.keys() - {"strict"}:
            raise UsageError("give the file alone, or with --strict: steersman config check FILE")
        (name,) = parsed.arguments
        try:
            data = read_file(name)
        except ConfigError as error:
            raise CommandError(f"{name}: error: {error}") from error
        answer = check_config(name, data, strict=bool(parsed.values.get("strict")))
    else:
        COMMAND.check_flags(parsed)
        answer = show_config(parsed.config, str(parsed.values.get("output", "yaml")))
    print(answer.text, end="")
    return answer.status


COMMAND = Command(
    name="config",
    summary="check a configuration file, or show the configuration in force",
    description=(
        "`config check FILE` reads a KubeProxyConfiguration and lists everything that is wrong\n"
        "or ignored; `config show` prints the configuration that results from the given flags."
    ),
    group="Tools",
    arguments=(
        Argument("check|show", "What to do.", required=True),
        Argument("FILE", "The file to check.", completes="file"),
    ),
    flags=(_STRICT, _OUTPUT),
    examples=(
        Example("steersman config check /var/lib/kube-proxy/config.conf", "check a file"),
        Example(
            "steersman config show --cluster-cidr 10.244.0.0/16",
            "the configuration that results from flags",
        ),
    ),
    main=_main,
)
