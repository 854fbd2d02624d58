"""What goes wrong in a node's life: each begins now and ends when `Life.heal` is called, or before.

A trouble says how long recovery may take beyond the retry interval (`Life.recovery`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.sim.cluster import Fault
from tests.sim.hostile import burst, hostile_clients
from tests.sim.kernel import Fault as KernelFault
from tests.sim.life import Life
from tests.sim.node import HEALTH, NAME
from tests.sim.switches import live_switch


def kernel_busy(life: Life) -> None:
    fault = KernelFault(life.dice.choice(("apply", "read", "fingerprint")), "busy", 10_000)
    life.node.kernel.faults.append(fault)
    life.heals.append(life.node.kernel.faults.clear)
    life.calm(life.dice.expovariate(1 / 40.0))


def cannot_write(life: Life) -> None:
    """A change waits for too long: the probes must tell, and say when it is over."""
    # What else fails may keep the change from coming; a process that starts owes nothing for long.
    if life.heals or life.node.process is None or life.universe.now < life.started + 60.0:
        return
    life.node.kernel.faults.append(KernelFault("apply", "busy", 10_000))
    life.heals.append(life.node.kernel.faults.clear)
    life.change_probe()
    life.universe.run(2 * life.node.period + 5.0)
    if life.node.kernel.counts["apply"]:
        life.oracle.page(HEALTH, "/livez", 503)


def kernel_fails_once(life: Life) -> None:
    ways = ("busy", "refused", "again", "late", "lost", "partly", "partly_refused", "slow")
    for _ in range(life.dice.randint(1, 4)):
        fault = KernelFault("apply", life.dice.choice(ways), life.dice.randint(1, 2))
        life.node.kernel.faults.append(fault)
        life.change_slice()
        life.universe.run(life.dice.expovariate(1 / 10.0))
    life.heals.append(life.node.kernel.faults.clear)


def kernel_reads_fail(life: Life) -> None:
    for operation in ("read", "fingerprint", "probe"):
        what = life.dice.choice(("busy", "again", "slow"))
        life.node.kernel.faults.append(KernelFault(operation, what, life.dice.randint(1, 3)))
    life.heals.append(life.node.kernel.faults.clear)


def poison(life: Life) -> None:
    name = f"tenant/s{life.dice.randrange(14)}"
    life.node.kernel.poison.add(name)
    life.dice.choice((life.heals, life.lasting)).append(life.node.kernel.poison.clear)
    life.change_slice(int(name.removeprefix("tenant/s")))


def strangers(life: Life) -> None:
    """Another program edits our rules."""
    kernel, dice = life.node.kernel, life.dice
    daemon = life.node.daemon
    if daemon is None or not kernel.tables:
        return
    name = max(kernel.tables, key=lambda table: len(kernel.tables[table]))
    kernel.deaf = dice.random() < 0.3

    def vandalize(table: dict[Any, Any]) -> None:
        keys = list(table)
        match dice.randrange(3):
            case 0:
                table.clear()
            case 1:
                for key in dice.sample(keys, min(len(keys), 5)):
                    del table[key]
            case _:
                if len(keys) > 2:
                    one, other = dice.sample(keys, 2)
                    table[one] = table[other]

    kernel.edit(name, vandalize)

    def hear() -> None:
        kernel.deaf = False

    life.heals.append(hear)


def netlink_fails(life: Life) -> None:
    faults = life.node.netlink.faults
    for what in ("emfile", "enobufs", "interrupted", "refused_delete", "lost_news"):
        if life.dice.random() < 0.5:
            faults[what] += life.dice.randint(1, 3)
    life.pods()
    life.heals.append(faults.clear)
    life.recovery = max(life.recovery, 130.0)


def api_answers_badly(life: Life) -> None:
    ways = ("status", "html", "reset", "silence", "truncated", "malformed", "ended", "other_kind")
    for server in life.servers:
        for _ in range(life.dice.randint(1, 3)):
            code = life.dice.choice((401, 403, 404, 410, 429, 500, 503))
            fault = Fault(life.dice.choice(ways), life.dice.randint(1, 3), code=code)
            fault.retry_after = life.dice.choice((0, 1, 20))
            if code == 404:  # an absent resource is requested again after five minutes or so
                life.recovery = max(life.recovery, 480.0)
            server.faults.append(fault)
        server.drop()
        life.heals.append(server.faults.clear)
    life.recovery = max(life.recovery, 120.0)


def api_down(life: Life) -> None:
    for server in life.servers:
        if life.dice.random() < 0.7:
            server.up(False)
            life.heals.append(lambda s=server: s.up(True))  # type: ignore[misc]
    life.recovery = max(life.recovery, 120.0)


def api_silent(life: Life) -> None:
    for server in life.servers:
        if life.dice.random() < 0.7:
            server.silent(True)
            life.heals.append(lambda s=server: s.silent(False))  # type: ignore[misc]
    life.recovery = max(life.recovery, 400.0)


def api_slow(life: Life) -> None:
    server = life.dice.choice(life.servers)
    server.latency, server.delay = life.dice.uniform(0, 5), life.dice.uniform(0, 20)

    def heal() -> None:
        server.latency, server.delay = 0.0, 0.002

    life.heals.append(heal)
    life.recovery = max(life.recovery, 90.0)


def history_lost(life: Life) -> None:
    if life.dice.random() < 0.5:
        life.etcd.compact()
        for server in life.servers:
            life.dice.choice((server.expire, server.drop, server.restart))()
    else:
        life.etcd.restore(life.dice.choice((1, life.etcd.version + 5_000)))
    life.recovery = max(life.recovery, 120.0)


def node_deleted(life: Life) -> None:
    """The Node is deleted by mistake, or loses its addresses; a restart must find it whole."""
    node = life.etcd.objects["Node"].get(("", NAME))
    if node is None or life.dice.random() < 0.5:
        life.etcd.delete("Node", ("", NAME))
    else:
        life.etcd.put({**node, "status": {}})
    life.calm(life.dice.expovariate(1 / 60.0))
    life.lasting.append(life.put_node)
    process = life.node.process
    if life.heals or process is None or life.universe.now < life.started + 60.0:
        life.end_lasting()  # whether the process has seen the Node is not sure


def clock_steps(life: Life) -> None:
    life.universe.step_wall_clock(life.dice.choice((-86_400.0, -60.0, 60.0, 86_400.0)))


def killed(life: Life) -> None:
    life.universe.run(life.dice.expovariate(20.0))
    life.node.kill()
    life.recovery = max(life.recovery, 60.0)


def terminated(life: Life) -> None:
    life.change_slice()
    life.universe.run(life.dice.expovariate(20.0))
    life.node.terminate()
    life.recovery = max(life.recovery, 60.0)


def dies_young(life: Life) -> None:
    """A process is killed again and again while it starts."""
    for _ in range(life.dice.randint(1, 4)):
        life.node.kill()
        for _ in range(20):
            life.universe.run(1.0)
            if life.node.process is not None:
                break
        life.universe.run(life.dice.expovariate(30.0))
    life.dice.choice((life.node.kill, life.node.terminate))()
    life.recovery = max(life.recovery, 60.0)


def two_instances(life: Life) -> None:
    """A second instance starts: it takes over, or is refused; one of the two may be killed."""
    node = life.node
    if life.heals or life.lasting or node.process is None:  # the newcomer would not know the Node
        return
    if life.universe.now < life.started + 60.0:
        return
    first, take_over = node.process, life.dice.random() < 0.7
    second = node.start(take_over=take_over)
    life.universe.run(life.dice.choice((0.01, 0.2, 2.0)) * life.dice.random())
    if (dies := life.dice.choice((None, None, first, second))) is not None:
        dies.kill()
    life.calm(life.dice.expovariate(1 / 20.0))
    life.universe.run(5.0)
    if dies is None and not (second if take_over else first).running:
        node.kernel.fail("the wrong one of two instances has ended")
    if len(node.processes) > 1:
        node.kernel.fail("two instances run beside each other")
    life.recovery = max(life.recovery, 60.0)


def reloaded(life: Life) -> None:
    """The configuration changes, is broken for a while, and changes again."""
    node = life.node
    if life.dice.random() < 0.3:
        node.write_config("{ broken")
        life.universe.run(life.dice.expovariate(1 / 10.0))
    masquerade = life.dice.random() < 0.5
    node.document["iptables"]["masqueradeAll"] = masquerade
    node.document["nftables"]["masqueradeAll"] = masquerade
    if node.ejects:
        wanted = node.document["steersman"]
        wanted["ejectFailingEndpoints"] = not wanted["ejectFailingEndpoints"]
    life.oracle.protect()
    node.write_config()
    life.change_slice()
    life.universe.run(life.dice.expovariate(5.0))


def mode_switch(life: Life) -> None:
    names = ("iptables", "nftables", "ipvs", "ebpf", "userspace")
    node = life.node
    node.mode = life.dice.choice(names)
    node.document["mode"] = node.mode
    node.write_config()
    node.terminate()
    life.recovery = max(life.recovery, 300.0)


TROUBLES: tuple[Callable[[Life], None], ...] = (
    *(
        cannot_write,
        kernel_busy,
        kernel_fails_once,
        kernel_fails_once,
        kernel_reads_fail,
        poison,
        strangers,
    ),
    *(netlink_fails, api_answers_badly, api_down, api_silent, api_slow, history_lost),
    *(
        node_deleted,
        clock_steps,
        killed,
        terminated,
        dies_young,
        two_instances,
        reloaded,
        mode_switch,
    ),
    *(hostile_clients, burst),
    *(live_switch, live_switch, live_switch),
)
