"""`steersman ui`: pages about this node or a whole cluster, in a browser."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from steersman.cli.command import CLUSTER, Command, Example
from steersman.cli.fleet import HOW, NODE_FLAGS, finder_of
from steersman.config.flags_upstream import Flag, Group
from steersman.operate.answer import QuestionError

if TYPE_CHECKING:
    from steersman.ui.site import Site

_LISTEN = "127.0.0.1:8026"


def run_ui(words: Sequence[str]) -> int:
    """Serve pages until a signal ends it; return the exit status."""
    from steersman.config import parse_command_line  # noqa: PLC0415 - not for --help
    from steersman.host.limits import raise_descriptor_limit  # noqa: PLC0415
    from steersman.model.addresses import join_host_port, split_host_port  # noqa: PLC0415
    from steersman.run.process.startup import cluster_access  # noqa: PLC0415
    from steersman.ui.access import Access, ClusterAccess, Reviewer  # noqa: PLC0415
    from steersman.ui.fleet import Fleet  # noqa: PLC0415
    from steersman.ui.pages import PAGES  # noqa: PLC0415
    from steersman.ui.site import Site  # noqa: PLC0415

    parsed = parse_command_line(words, extra=COMMAND.flags)
    COMMAND.check_flags(parsed)
    listen = str(parsed.values.get("listen") or _LISTEN)
    try:
        host, port = split_host_port(listen)
    except ValueError as error:
        raise QuestionError(f"--listen {listen}: {error}") from error
    login = bool(parsed.values.get("login"))
    if host not in ("127.0.0.1", "::1") and not login:
        raise QuestionError(
            f"--listen {join_host_port(host, port)}: pages have no login on an operator's machine, "
            "so only loopback is served; from elsewhere, use a tunnel (ssh -L), or --login"
        )
    raise_descriptor_limit()  # each node takes one
    fleet = Fleet(finder_of(parsed))
    access = Access()
    if login:
        namespace = str(parsed.values.get("pod-namespace") or "")
        access = ClusterAccess(Reviewer(cluster_access(parsed.config)), namespace)

    async def main() -> None:
        following = asyncio.create_task(fleet.run())
        try:
            await serve(Site(fleet, PAGES, access), host, port, following)
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following

    asyncio.run(main())
    return 0


async def serve(site: Site, host: str, port: int, following: asyncio.Task[None]) -> None:
    """Serve the pages until a signal comes, or following the nodes fails."""
    from steersman.run.serve.connections import (  # noqa: PLC0415 - not for --help
        Bounds,
        ClientPool,
        ListenError,
    )
    from steersman.run.serve.http import listen  # noqa: PLC0415

    stop = asyncio.create_task(asyncio.Event().wait())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.cancel)
    try:
        server = await listen(site.app, host, port, ClientPool(Bounds(busy=inf)))
    except ListenError as error:
        raise QuestionError(f"--listen: cannot {error.strerror}") from error
    try:
        name = f"[{host}]" if ":" in host else host
        print(f"http://{name}:{server.port}/", flush=True)
        tasks = (stop, following, server.accepting)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stop}:
            task.result()
    finally:
        await server.close()


COMMAND = Command(
    name="ui",
    group="Run",
    summary="serve pages about this node or a whole cluster, for a browser",
    description=f"""\
Serve pages on loopback: the cluster, Services, problems, the last hour, plans. They stay up to
date, keep nothing on disk, and change nothing unless asked. Each page is also available as JSON, at
the same address.

{HOW}""",
    flags=(
        Flag("listen", "string", _LISTEN, Group.OWN, "Address and port to serve."),
        Flag(
            "login",
            "bool",
            "false",
            Group.OWN,
            "Ask readers for a token; the API server decides who may see what.",
        ),
        *NODE_FLAGS,
    ),
    examples=(
        Example("steersman ui", "this node"),
        Example("steersman ui --kubeconfig ~/.kube/config --token-file token", "a cluster"),
        Example("steersman ui --nodes-file nodes --token-file token", "these nodes"),
    ),
    takes=CLUSTER,
    main=run_ui,
)
