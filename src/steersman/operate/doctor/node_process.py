"""Checks of our process and its knowledge: alive, synced, connected, this node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from email.utils import parsedate_to_datetime

from steersman.model import codes
from steersman.model.addresses import in_cidr, join_host_port
from steersman.model.names import Family
from steersman.model.plan import Pool, Verdict
from steersman.netfilter.failure_log import TABLE_PREFIX
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.processes import ELSEWHERE, sees_processes
from steersman.operate.doctor.result import Cause, CheckResult, Found, error, ok, unknown, warning
from steersman.run.process.instance import running

_QUIET = 150.0
"""Seconds without a word of the API server: it sends a bookmark about every minute."""
_OLD = 60.0
"""Seconds that a change may wait for a sync."""
_MOMENT = 2.0
"""Seconds in which a change that came just now is synced."""
_SKEW = 5.0, 300.0
"""Seconds that clocks may differ; beyond the second, tokens and certificates are refused."""
_KUBERNETES = 1, 36
"""Version whose kube-proxy this program equals."""
_MOST_EJECTED = 20
"""Ejected endpoints that are listed."""
_BEHIND = 3
"""Minor versions that the proxy may be older than the API server (Kubernetes' skew policy)."""


async def process(context: Context) -> Found:
    """Check that steersman runs, and that the kernel has all of its changes."""
    status, world = context.world.process, context.world
    if world.origin.hung:
        return error(
            world.origin.hung,
            f"the answer is from {world.origin.text}",
            remedy="`kill -CONT` continues a process that was stopped; otherwise look at its log,"
            " and restart it: rules in the kernel stay",
        )
    if status is None:
        # The question may be about manifests although a process runs: the node lock tells.
        holder = await asyncio.to_thread(running)
        if holder is not None:
            return ok(f"it runs ({holder}); this answer is about {world.origin.text}")
        return error(
            "no steersman runs on this node, so nobody updates its rules",
            f"the answer is from {world.origin.text}",
            remedy="start it: `systemctl start steersman`, or look at its pod with kubectl",
        )
    about = f"version {status.version}, {world.mode} mode, pid {status.pid}"
    if not status.synced_at:
        why = f": it waits for {status.waiting}" if status.waiting else ""
        return error(f"it has not written any rule yet{why}", about, remedy="look at its log")
    age = max(0.0, context.now() - status.synced_at)
    last = f"last sync {age:.0f} s ago ({status.sync_reason})"
    # A change may wait for the minimum sync period, but hardly for a minute.
    if status.owes and age > _OLD and context.renew is not None:
        # On a quiet node the last sync is old, and a change may have come this very moment.
        await asyncio.sleep(_MOMENT)
        status = (await context.renew(world)).process or status
        age = max(0.0, context.now() - status.synced_at)
    if status.owes and age > _OLD:
        return error(
            f"changes wait for a sync, and the last one was {age:.0f} s ago",
            about,
            *sorted(f"{name}: {took:.2f} s" for name, took in status.phases.items()),
            remedy="its log says why syncs fail (`steersman status`)",
        )
    if status.refused:
        return _refused(context, status.refused)
    if not status.healthy:
        return warning("it calls itself unhealthy", about, last, remedy="see `steersman status`")
    return ok(f"{about}; {last}")


def _refused(context: Context, owners: int) -> CheckResult:
    """Report rules that the kernel refuses: an error if they are the question's or the node's."""
    asked = context.question.service
    mine = {"the node", *([f"Service {asked}"] if asked else [])}
    found = [each for each in context.world.findings if each.code == codes.REFUSED]
    say = error if not asked or mine & {each.object for each in found} else warning
    return say(
        f"the kernel refuses the rules of {owners} of their owners (Services, or the node)",
        *map(str, found),
        code=codes.REFUSED,
        remedy="see the kernel's reason; what was in force before stays",
        cause=Cause.RULES - 3,
    )


async def source(context: Context) -> Found:
    """Check that changes of the cluster reach the process."""
    status = context.world.process
    if status is None:
        return unknown("the process was not asked")
    found = status.source
    if found.kind == "manifests":
        return ok("objects come from manifests")
    errors = sorted(f"{count} times {why}" for why, count in found.errors.items())
    if not found.connected and "http_403" in found.errors:
        return error(
            f"it does not get all objects from the API server {found.server}, which refused "
            "requests (HTTP 403): changes of some kinds do not arrive",
            *errors,
            remedy="let its ServiceAccount list and watch Services, EndpointSlices and Nodes, "
            "as the ClusterRole of the chart does",
        )
    if not found.connected:
        return error(
            f"it is not connected to the API server {found.server}: changes of Services and "
            "endpoints do not arrive",
            *errors,
            remedy="check that the API server answers from this node, and the credentials",
        )
    # A half-open connection (NAT, a firewall that forgot it) looks connected, and is silent.
    if found.quiet_seconds is not None and found.quiet_seconds > _QUIET:
        return warning(
            f"the API server {found.server} has sent nothing for {found.quiet_seconds:.0f} s",
            *errors,
            remedy="a connection may hang: check load balancers and NAT on the way to it",
            suspect=True,
        )
    return ok(f"connected to {found.server}", *errors)


async def node(context: Context) -> Found:
    """Check that this node is known, and that its pods can be recognised."""
    world = context.world
    name = world.config.node_name or world.plan.settings.node_name
    if world.snapshot.node is not None:
        return ok(f"the Node object {name} is known")
    others = sorted(each.metadata.name for each in world.nodes)
    by_node = any(
        not frontend.external.pool == frontend.pod.pool == Pool.CLUSTER
        or Verdict.DROP in (frontend.external.verdict, frontend.pod.verdict)
        for plan in context.plans
        for frontend in plan.frontends
    )
    return warning(
        f"there is no Node object named {name}: no endpoint counts as local, and zone and pod "
        "networks of this node are unknown",
        *([f"the nodes are {', '.join(others[:10])}"] if others else []),
        remedy="--hostname-override gives the name of the Node object",
        # Only policy Local asks which endpoints are on this node.
        suspect=by_node,
        code=codes.UNKNOWN_NODE,
    )


async def pods(context: Context) -> Found:
    """Check that the setting which recognises local pods (such as clusterCIDR) is right."""
    return [_recognised(context, family) for family in context.families]


def _recognised(context: Context, family: Family) -> CheckResult:
    """Judge the setting that recognises the pods of one family."""
    own, label = context.world.plan.settings.family(family), family.kubernetes
    if not own.detector:
        return warning(
            f"{label}: pods of this node cannot be recognised: their traffic to external addresses "
            "is treated like that of clients outside, also for masquerading",
            remedy="set --cluster-cidr, or another way by --detect-local-mode",
        )
    # Pods of this node that serve something; those in the host's network are no pods here.
    local = {
        endpoint.ip
        for plan in context.world.plan.services.values()
        if plan.key.family is family
        for endpoint in plan.reachable
        if endpoint.local and not own.sources.is_local(endpoint.ip)
    }
    cidr = own.detector.cidr
    if strangers := sorted(ip for ip in local if cidr and not in_cidr(ip, cidr)):
        return warning(
            f"{label}: pods of this node have addresses outside of the pod network {cidr}: "
            f"{', '.join(strangers[:3])}",
            *strangers[3:],
            remedy="correct --cluster-cidr (or the Node's podCIDR)",
            suspect=True,
        )
    how = cidr or own.detector.interface or own.detector.interface_prefix
    return ok(f"{label}: pods of this node are recognised by {how}")


async def failover(context: Context) -> Found:
    """Check that failing endpoints are seen if that is asked for, and nothing of it is left."""
    remedy = "docs/failover.md says what that needs of the kernel"
    results = [
        warning(each.reason, remedy=remedy, code=each.code)
        for each in context.world.findings
        if each.code == codes.FAILOVER
    ]
    watched = []
    for family, name in await asyncio.to_thread(context.list_tables):
        if name.startswith(TABLE_PREFIX):
            pid, _, _ = name.removeprefix(TABLE_PREFIX).partition("-")
            # The pid is one of its own pid namespace, as is that in the state of the process.
            runs = context.world.process and str(context.world.process.pid) == pid
            if runs or context.path(f"proc/{pid}").exists():
                watched.append(f"table {family} {name}")
            elif not sees_processes(context.path("proc")):
                text = f"whether process {pid} of the table {family} {name} runs"
                results.append(unknown(f"{text} cannot be seen: {ELSEWHERE}"))
            else:
                text = f"the table {family} {name} is left of process {pid}, which has ended"
                remedy = "end the process that has inherited its socket"
                results.append(warning(text, remedy=remedy))
    if watched:
        results.append(ok("packets of connections that fail are logged", *watched))
    return results or ok("nothing keeps failing endpoints from being ejected, if asked for")


async def api_server(context: Context) -> Found:
    """Compare the clock and the version of the API server with ours."""
    if context.ask_api is None:
        return unknown("the API server was not asked: no credentials are known here")
    # The reply was made about half-way between question and answer.
    before = context.now()
    reply = await context.ask_api("/version")
    between = (before + context.now()) / 2
    if reply.status != 200 or not isinstance(reply.body, dict):
        return unknown(f"the API server answered {reply.status} when asked for its version")
    return [*_clock(reply.headers.get("date", ""), between), *_version(reply.body)]


def _clock(date: str, now: float) -> Iterable[CheckResult]:
    try:
        skew = parsedate_to_datetime(date).timestamp() + 0.5 - now  # the header has no fractions
    except ValueError:
        yield unknown("the API server sends no date")
        return
    if abs(skew) <= _SKEW[0]:
        yield ok("the clocks of this node and of the API server agree")
        return
    where, refused = "behind" if skew > 0 else "ahead of", abs(skew) > _SKEW[1]
    text = f"this node's clock is {abs(skew):.0f} s {where} the API server's"
    if refused:
        text += ": tokens and certificates may be refused"
    remedy = "synchronise the clocks (chronyd, systemd-timesyncd)"
    yield warning(text, remedy=remedy, suspect=refused)


def _version(body: dict[str, object]) -> Iterable[CheckResult]:
    text = str(body.get("gitVersion", ""))
    digits = [part for part in text.lstrip("v").split(".")[:2] if part.isdigit()]
    if len(digits) < 2:
        yield unknown(f"the version {text!r} of the API server is not understood")
        return
    theirs, ours = (int(digits[0]), int(digits[1])), _KUBERNETES
    mine = f"v{ours[0]}.{ours[1]}"
    if theirs[0] == ours[0] and ours[1] - _BEHIND <= theirs[1] <= ours[1] + _BEHIND:
        yield ok(f"the API server is {text}; this program behaves as kube-proxy {mine}")
    else:
        words = "newer" if theirs > ours else "older"
        yield warning(
            f"the API server is {text}, more than {_BEHIND} minor versions {words} than {mine}, "
            "whose kube-proxy this program equals",
            remedy="upgrade the older of the two",
        )


async def ejected(context: Context) -> Found:
    """Check whether endpoints are out of use because they did not answer this node."""
    asked, world = context.question.service, context.world
    out = [
        f"Service {name}: {join_host_port(*each.backend[:2])} is ejected: {each.why}"
        for name, ejections in sorted(world.snapshot.ejected.items())
        for each in ejections
        if asked is None or asked == name
    ]
    if out:
        return warning(
            f"endpoints that did not answer get no new connections from this node: {len(out)}",
            *out[:_MOST_EJECTED],
            code=codes.EJECTED,
            remedy="look at their pods and nodes; they return once they answer "
            '(steersman/eject: "false" on a Service keeps its endpoints in)',
            suspect=True,
        )
    return ok("no endpoint is ejected")
