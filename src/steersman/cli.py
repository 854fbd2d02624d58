"""The `steersman` command: parses, calls, prints; decides nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from steersman import __version__
from steersman.compile.explain import explain_flow, explain_service
from steersman.compile.plan import compile_all
from steersman.compile.trace import Flow
from steersman.host.exec import SubprocessExec
from steersman.host.facts import read_facts
from steersman.model.addresses import canonical_ip, split_host_port
from steersman.model.config import DetectLocalMode, NodeConfig
from steersman.model.names import ObjectName, Protocol
from steersman.model.plan import SourceClass
from steersman.modes.base import ApplyError, BusyError
from steersman.modes.diff import Diff
from steersman.modes.registry import MODES, ModeOptions
from steersman.run.daemon import (
    Daemon,
    Options,
    UnusableModeError,
    clean_up,
    load_store,
    preview,
)


class CommandError(Exception):
    """A command cannot be carried out; the message says why and what to do."""


def format_diff(change: Diff) -> str:
    """Write a Diff for people: a line per line of kernel text, marked `+` or `-`."""
    lines: list[str] = []
    for mark, objects in (("-", change.removed), ("+", change.added)):
        for key in sorted(objects, key=str):
            lines += [f"{mark} {text}" for text in _text(key, objects[key])]
    for key in sorted(change.changed, key=str):
        old, new = (_text(key, value) for value in change.changed[key])
        lines += [f"- {text}" for text in old if text not in new]
        lines += [f"+ {text}" for text in new if text not in old]
    return "\n".join(lines)


def _text(key: object, value: object) -> list[str]:
    parts = key if isinstance(key, tuple) else (key,)
    name = " ".join(str(part) for part in parts if part != "")
    return [f"{name}: {line}" for line in str(value).splitlines() or [""]]


def _options(args: argparse.Namespace) -> Options:
    config = NodeConfig(
        node_name=args.hostname_override,
        detect_local_mode=DetectLocalMode(args.detect_local_mode),
        cluster_cidrs=_words(args.cluster_cidr),
        bridge_interface=args.pod_bridge_interface,
        interface_name_prefix=args.pod_interface_name_prefix,
        node_port_addresses=_words(args.nodeport_addresses),
        localhost_node_ports=args.iptables_localhost_nodeports,
        masquerade_all=args.masquerade_all,
        split_threshold=args.split_threshold,
    )
    return Options(
        config=config,
        mode=args.proxy_mode,
        mode_options=ModeOptions(iptables_variant=args.iptables_variant),
        manifests=tuple(args.manifests),
        kubeconfig=args.kubeconfig,
        masters=tuple(args.master),
        min_sync_period=args.iptables_min_sync_period,
        sync_period=args.iptables_sync_period,
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _run(args: argparse.Namespace) -> int:
    options = _options(args)
    if args.dry_run:
        change, findings = asyncio.run(preview(options))
        print(format_diff(change) or "nothing to change")
        for finding in findings:
            print(f"finding: {finding}", file=sys.stderr)
        return 0
    asyncio.run(Daemon(options).run())
    return 0


def _clean(args: argparse.Namespace) -> int:
    options = ModeOptions(iptables_variant=args.iptables_variant)
    for mode, change in asyncio.run(clean_up(SubprocessExec(), options)).items():
        print(f"{mode}: {len(change.removed)} kernel objects removed")
    return 0


def _explain(args: argparse.Namespace) -> int:
    answer = asyncio.run(_explanation(args))
    print(json.dumps(answer.data, indent=2) if args.output == "json" else answer.text)
    return 0


async def _explanation(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    options = _options(args)
    store = await load_store(options)
    mode = MODES[options.mode](SubprocessExec(), options.mode_options)
    plan = compile_all(store.snapshot, options.config, await read_facts(), mode.traits)
    if args.service:
        namespace, _, name = args.service.partition("/")
        if not name:
            raise CommandError(f"{args.service!r}: give the Service as NAMESPACE/NAME")
        return explain_service(store.snapshot, plan, ObjectName(namespace, name))
    return explain_flow(plan, _flow(args))


def _flow(args: argparse.Namespace) -> Flow:
    if not args.to:
        raise CommandError("give a Service (NAMESPACE/NAME), or --to IP:PORT with --from")
    destination, _, protocol = args.to.partition("/")
    address, port = split_host_port(destination)
    source = args.source
    if source in tuple(SourceClass):
        source = SourceClass(source)
    elif canonical_ip(source) is None:
        raise CommandError(f"--from {source!r}: give an address, pod, node or external")
    return Flow(source, address, port, Protocol((protocol or "tcp").upper()), args.interface)


def _common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--manifests", type=Path, action="append", default=[], metavar="DIR")
    add("--kubeconfig", default="", metavar="FILE")
    add("--master", action="append", default=[], metavar="URL")
    add("--hostname-override", default="", metavar="NAME")
    add("--proxy-mode", default="iptables", choices=sorted(MODES))
    add("--cluster-cidr", default="", metavar="CIDR[,CIDR]")
    add("--detect-local-mode", default="ClusterCIDR", choices=[str(m) for m in DetectLocalMode])
    add("--pod-bridge-interface", default="", metavar="NAME")
    add("--pod-interface-name-prefix", default="", metavar="PREFIX")
    add("--nodeport-addresses", default="", metavar="CIDR[,CIDR]")
    add("--masquerade-all", action=argparse.BooleanOptionalAction, default=False)
    add("--iptables-localhost-nodeports", action=argparse.BooleanOptionalAction, default=True)
    add("--iptables-min-sync-period", type=float, default=1.0, metavar="SECONDS")
    add("--iptables-sync-period", type=float, default=30.0, metavar="SECONDS")
    add("--iptables-variant", default="", choices=["", "nft", "legacy"])
    add("--split-threshold", type=int, default=500, metavar="SERVICEPORTS")


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="steersman", description=__doc__)
    parser.add_argument("--version", action="version", version=f"steersman {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call: Callable[[argparse.Namespace], int], text: str):  # type: ignore[no-untyped-def]
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(call=call)
        _common(sub)
        return sub

    run = command("run", _run, "watch Services and program this node's kernel")
    run.add_argument("--dry-run", action="store_true", help="print what would change, and stop")
    command("cleanup", _clean, "remove everything that steersman wrote into the kernel")
    explain = command("explain", _explain, "say what happens to a connection, and why")
    explain.add_argument("service", nargs="?", default="", metavar="NAMESPACE/SERVICE")
    explain.add_argument(
        "--from", dest="source", default="external", metavar="ADDR|pod|node|external"
    )
    explain.add_argument("--to", default="", metavar="IP:PORT[/udp|sctp]")
    explain.add_argument("--interface", default="", help="interface that the packet comes in by")
    explain.add_argument("--output", default="text", choices=["text", "json"])
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        return int(args.call(args))
    except (ApplyError, BusyError, CommandError, OSError, UnusableModeError, ValueError) as error:
        print(f"steersman: {error}", file=sys.stderr)
        return 1
