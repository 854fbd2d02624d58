"""The commands `steersman` and `kube-proxy`: parse the words, call the part, print the answer."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import logging
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from steersman import __version__
from steersman.compile.explain import Explanation, explain_flow, explain_service
from steersman.compile.planner import compile_all
from steersman.compile.trace import Flow
from steersman.config import (
    SHELLS,
    ConfigError,
    Flag,
    Group,
    Parsed,
    ProxyConfig,
    check_config,
    completion,
    help_text,
    parse_command_line,
    read_file,
    show_config,
    to_mode_options,
    to_yaml,
)
from steersman.host.exec import SubprocessExec
from steersman.host.facts import hostname, read_facts
from steersman.host.sysctl import SysctlError
from steersman.model.addresses import canonical_ip, split_host_port
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import ObjectName, Protocol
from steersman.model.plan import SourceClass
from steersman.modes.registry import dump
from steersman.modes.specs import SPECS, ModeSpec
from steersman.run.assemble import preview, run_daemon
from steersman.run.event_loop import MeasuredLoop, run_to_end
from steersman.run.instance import Instance, running
from steersman.run.klog import ProcessLog
from steersman.run.machine import Machine
from steersman.run.mode_transition import clean_up
from steersman.run.startup import (
    StartError,
    allow_localhost_node_ports,
    load_store,
    new_mode,
    node_config,
    prepared_mode,
    set_conntrack,
)
from steersman.run.state import status_text
from steersman.source.kubeconfig import KubeconfigError

EXPLAIN_FLAGS: Final = (
    Flag("from", "string", "external", Group.OWN, "Source: an address, pod, node or external."),
    Flag("to", "string", "", Group.OWN, "Destination: IP:PORT, IP:PORT/udp or IP:PORT/sctp."),
    Flag("interface", "string", "", Group.OWN, "Interface by which the packet arrives."),
    Flag("output", "string", "text", Group.OWN, "text or json.", choices=("text", "json")),
)
OUTPUT: Final = (Flag("output", "string", "yaml", Group.OWN, "yaml or json."),)
CHECK_FLAGS: Final = (
    Flag(
        "strict",
        "bool",
        "false",
        Group.OWN,
        "Treat warnings as errors, and refuse modes that upstream lacks.",
    ),
)


class CommandError(Exception):
    """A command failed; the message says why and what to do."""


_EXPECTED: Final = (
    ApplyError,
    BusyError,
    CommandError,
    ConfigError,
    KubeconfigError,
    StartError,
    SysctlError,
    TimeoutError,
)
"""Errors whose text is enough for a user; others get a traceback."""
_PIPE_CLOSED: Final = 128 + 13  # as shells report SIGPIPE
_INTERRUPTED: Final = 128 + 2


def _run(argv: Sequence[str], program: str = "steersman run") -> int:
    parsed = parse_command_line(argv)
    if _answered(parsed, program):
        return 0
    config = parsed.config
    if path := parsed.write_config_to:
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(to_yaml(config))
        except OSError as error:
            raise CommandError(f"--write-config-to {path}: {error.strerror}") from error
        return 0
    patterns = ",".join(f"{m.file_pattern}={m.verbosity}" for m in config.logging.vmodule)
    logs = ProcessLog(config.logging.format or "text", config.logging.verbosity, patterns)
    for warning in parsed.warnings:
        logging.getLogger("steersman").warning("%s", warning)
    if parsed.cleanup:
        return _remove(config)
    if parsed.init_only:
        asyncio.run(_initialize(config))
        return 0
    if parsed.dry_run:
        words, findings = asyncio.run(preview(config))
        print(words or "nothing to change")
        for finding in findings:
            print(f"finding: {finding}", file=sys.stderr)
        return 0
    instance, loop_factory = None, None
    # Windows has no network namespaces, and no mode writes rules there. It waits for its
    # subprocesses and sockets with another loop, which is not measured.
    if sys.platform != "win32":
        instance = Instance(config.mode, hostname(), take_over=config.steersman.take_over)
        loop_factory = MeasuredLoop
    daemon = run_daemon(parsed, logs, Machine(instance=instance))
    name = program.split(maxsplit=1)[0]
    runner = asyncio.Runner(loop_factory=loop_factory)
    return run_to_end(runner, daemon, lambda error: _report(error, name))


def _answered(parsed: Parsed, program: str, extra: Sequence[Flag] = ()) -> bool:
    """Print help or the version if it was asked for; return whether it was."""
    if parsed.help:
        print(help_text(program, extra))
    elif parsed.version:
        print(__version__ if parsed.version == "raw" else f"steersman {__version__}")
    return bool(parsed.help or parsed.version)


async def _initialize(config: ProxyConfig) -> None:
    """Set the sysctls, which takes more privileges than NET_ADMIN (behaviour 1.6)."""
    mode = await prepared_mode(config)
    set_conntrack(config, mode.traits)
    allow_localhost_node_ports(node_config(config), mode, await read_facts())


def _remove(config: ProxyConfig) -> int:
    """Remove everything of ours from the kernel; return 1 if something is left."""
    done = asyncio.run(clean_up(SubprocessExec(), to_mode_options(config), running))
    for mode, removed in done.removed.items():
        print(f"{mode}: {removed} kernel objects removed")
    for problem in done.problems:
        print(f"not removed: {problem}", file=sys.stderr)
    return int(bool(done.problems))


def _cleanup(argv: Sequence[str]) -> int:
    parsed = parse_command_line(argv)
    return 0 if _answered(parsed, "steersman cleanup") else _remove(parsed.config)


def _explain(argv: Sequence[str]) -> int:
    parsed = parse_command_line(argv, extra=EXPLAIN_FLAGS, allow_arguments=True)
    if _answered(parsed, "steersman explain [NAMESPACE/SERVICE]", EXPLAIN_FLAGS):
        return 0
    answer = asyncio.run(_explanation(parsed))
    output = str(parsed.values.get("output", "text"))
    print(json.dumps(answer.data, indent=2) if output == "json" else answer.text)
    return 0 if answer.found else 1


async def _explanation(parsed: Parsed) -> Explanation:
    """Explain a Service, or a flow of the flags, on the plan of the current objects."""
    service = parsed.arguments[0] if parsed.arguments else ""
    flow = None if service else _flow(parsed.values)
    namespace, _, name = service.partition("/")
    if service and not name:
        raise CommandError(f"{service!r}: give the Service as NAMESPACE/NAME")
    store = await load_store(parsed.config)
    traits = new_mode(parsed.config).traits
    plan = compile_all(store.snapshot, node_config(parsed.config), await read_facts(), traits)
    if flow is not None:
        return explain_flow(plan, flow)
    return explain_service(store.snapshot, plan, ObjectName(namespace, name))


def _flow(values: Mapping[str, object]) -> Flow:
    """Return the flow that --from, --to and --interface describe."""
    text = str(values.get("to", ""))
    if not text:
        raise CommandError("give a Service (NAMESPACE/NAME), or --to IP:PORT with --from")
    destination, _, word = text.partition("/")
    try:
        address, port = split_host_port(destination)
        protocol = Protocol((word or "tcp").upper())
    except ValueError as error:
        raise CommandError(f"--to {text}: {error}") from error
    source: str | SourceClass | None = str(values.get("from", "external"))
    if source in tuple(SourceClass):
        source = SourceClass(source)
    elif (source := canonical_ip(given := str(source))) is None:
        raise CommandError(f"--from {given}: give an address, pod, node or external")
    return Flow(source, address, port, protocol, str(values.get("interface", "")))


def _config(argv: Sequence[str]) -> int:
    match list(argv):
        case ["check", *rest]:
            parsed = parse_command_line(rest, extra=CHECK_FLAGS, allow_arguments=True)
            if _answered(parsed, "steersman config check FILE", CHECK_FLAGS):
                return 0
            if len(parsed.arguments) != 1:
                raise CommandError("give the file: steersman config check FILE")
            (name,) = parsed.arguments
            try:
                data = read_file(name)
            except ConfigError as error:
                raise CommandError(f"{name}: error: {error}") from error
            answer = check_config(name, data, strict=bool(parsed.values.get("strict")))
        case ["show", *rest]:
            parsed = parse_command_line(rest, extra=OUTPUT)
            if _answered(parsed, "steersman config show", OUTPUT):
                return 0
            answer = show_config(parsed.config, str(parsed.values.get("output", "yaml")))
        case _:
            raise CommandError("give `check FILE` or `show`")
    print(answer.text, end="")
    return answer.status


def _status(argv: Sequence[str]) -> int:
    parsed = parse_command_line(argv)
    if _answered(parsed, "steersman status"):
        return 0
    address = parsed.config.metrics_bind_address
    if not address:
        raise CommandError("the metrics server is disabled, so there is no status to show")
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # never through an HTTP proxy
    try:
        with direct.open(f"http://{address}/state", timeout=10) as reply:
            document = json.load(reply)
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        raise CommandError(
            f"no answer from {address} ({error}); is steersman running here? "
            "Its address is --metrics-bind-address"
        ) from error
    print(status_text(document, time.time()))
    return 0


def _dump(spec: ModeSpec, argv: Sequence[str]) -> int:
    """Print a table of the kernel objects of a mode."""
    if len(argv) != 2 or argv[0] != "dump" or argv[1] not in spec.dumps:
        raise CommandError(f"give {spec.name} dump, and one of: {', '.join(spec.dumps)}")
    try:
        for line in dump(spec.name, argv[1]):
            print(line)
    except FileNotFoundError as error:
        raise CommandError(f"nothing is pinned: the {spec.name} mode does not run here") from error
    except PermissionError as error:
        raise CommandError(
            f"the maps of the {spec.name} mode cannot be read: this needs root"
        ) from error
    return 0


def _completion(argv: Sequence[str]) -> int:
    shell = argv[0] if argv else ""
    if shell not in SHELLS:
        raise CommandError(f"give the shell: {', '.join(SHELLS)}")
    print(completion(shell, program="steersman", commands=tuple(COMMANDS)))
    return 0


def _version(_: Sequence[str]) -> int:
    print(f"steersman {__version__}")
    return 0


Command = Callable[[Sequence[str]], int]
COMMANDS: Final[Mapping[str, tuple[Command, str]]] = {
    "run": (_run, "watch Services and program this node's kernel"),
    "explain": (_explain, "explain what happens to a connection or to a Service, and why"),
    "status": (_status, "show a status summary of the running process"),
    "cleanup": (_cleanup, "remove everything of ours from the kernel"),
    "config": (_config, "check FILE, or show the configuration in force"),
    **{
        name: (partial(_dump, spec), f"dump {', '.join(first)} or {last} of the {name} mode")
        for name, spec in SPECS.items()
        if spec.dumps
        for *first, last in [spec.dumps]
    },
    "completion": (_completion, "print shell completion: bash, zsh or fish"),
    "version": (_version, "print the version"),
}


def usage() -> str:
    """Return the list of commands."""
    lines = [f"  {name:12}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: steersman COMMAND [flags]",
            "",
            *lines,
            "",
            "steersman run --help lists the flags.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `steersman`; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)

    def command() -> int:
        if not words or words[0] in ("-h", "--help", "help"):
            print(usage())
            return 0 if words else 2
        name = "version" if words[0] == "--version" else words[0]
        if name not in COMMANDS:
            print(f"steersman: unknown command {name!r}\n\n{usage()}", file=sys.stderr)
            return 2
        return COMMANDS[name][0](words[1:])

    return _guarded(command, "steersman")


def kube_proxy(argv: Sequence[str] | None = None) -> int:
    """Run `kube-proxy`: upstream's command line; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return _guarded(lambda: _run(words, "kube-proxy"), "kube-proxy")


def _guarded(call: Callable[[], int], program: str) -> int:
    """Run a command; report its failures, also those of writing to standard output."""
    try:
        status = call()
        sys.stdout.flush()
    except BaseException as error:
        return _report(error, program)
    return status


def _report(error: BaseException, program: str) -> int:
    """Print an error, also of a task of the daemon; return the exit status.

    Expected errors are a sentence each. All others are defects and get a traceback.
    """
    match error:
        case BrokenPipeError():  # the reader of a pipe is gone: `steersman run --help | head`
            _drop_output()
            return _PIPE_CLOSED
        case OSError(errno=errno.ENOSPC):
            _drop_output()
            print(f"{program}: output: {error.strerror}", file=sys.stderr)
        case BaseExceptionGroup():
            for inner in error.exceptions:
                _report(inner, program)
        case _ if isinstance(error, _EXPECTED):
            print(f"{program}: {error}", file=sys.stderr)
        case KeyboardInterrupt():
            return _INTERRUPTED
        case SystemExit():
            raise error
        case _:
            traceback.print_exception(error)
    return 1


def _drop_output() -> None:
    """Discard standard output, so that the interpreter's last flush cannot fail."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
