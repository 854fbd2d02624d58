"""Live switches of the mode: under changes, in both directions, and disturbed in every step.

An operator asks the running process for a switch. After a number of steps that the dice decide
something goes wrong: the kernel, the canary, the operator's patience, the process itself. However
it ends, at rest one mode serves all that there is, and nothing of another one is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from steersman.model.errors import BusyError
from steersman.model.switch import SwitchRequest, SwitchResult, SwitchStep
from tests.sim.kernel import Fault
from tests.sim.life import Life
from tests.sim.node import Node

MODES = ("iptables", "nftables", "ipvs", "ebpf", "userspace")
_LONGEST = 60.0
"""Seconds of a switch that are accompanied by changes."""
_MOST_STEPS = 10
"""About as many steps as a switch has, its way back included."""


class Asked:
    """A switch, as the operator sees it who asked for it."""

    def __init__(self, node: Node, request: SwitchRequest) -> None:
        daemon, process = node.daemon, node.process
        assert daemon is not None
        assert process is not None
        self.request = request
        self.steps = 0
        self.result: SwitchResult | None = None
        self.refused = ""
        """Why it did not begin, or did not end."""
        self.on_step: Callable[[], None] = lambda: None
        self.task: asyncio.Task[None] | None = None
        self._process = process

        def tell(_: SwitchStep) -> None:
            self.steps += 1
            self.on_step()

        async def ask() -> None:
            try:
                self.result = await daemon.switch(request, tell)
                node.universe.note(f"switch: {self.result.outcome}: {self.result.text}")
            except BusyError as error:
                self.refused = str(error)

        def begin() -> None:
            self.task = process.loop.create_task(ask())

        node.universe.inside(process.loop, begin)

    @property
    def ended(self) -> bool:
        """Whether the operator waits no more."""
        return not self._process.running or (self.task is not None and self.task.done())

    def cancel(self) -> None:
        """Have the operator lose patience; the switch goes on."""
        if self.task is not None and self._process.running:
            self.task.cancel()


def live_switch(life: Life) -> None:
    """Switch the mode; something goes wrong in some step of it."""
    node, dice = life.node, life.dice
    if not serves(node) or node.daemon is None or node.daemon.switcher.running:
        return
    calm = not (life.heals or life.lasting) and life.universe.now > life.started + 60.0
    request = SwitchRequest(
        dice.choice(MODES),
        dry_run=dice.random() < 0.2,
        force=dice.random() < 0.7,
        watch_seconds=dice.choice((0.0, 1.0, 5.0)),
        drain_seconds=dice.choice((0.0, 5.0, 3600.0)),
    )
    life.universe.note(f"switch: {request}")
    _carry_connections(life)
    disturb = dice.choice(DISTURBANCES)
    step = dice.randrange(_MOST_STEPS)
    asked = Asked(node, request)

    def disturb_soon() -> None:
        if asked.steps == step:
            delay = dice.choice((0.0, dice.expovariate(1e3), dice.expovariate(20.0)))
            life.universe.after(delay, lambda: disturb(life, asked))

    asked.on_step = disturb_soon
    disturb_soon()
    until = life.universe.now + _LONGEST
    while not asked.ended and life.universe.now < until:
        dice.choice((life.change_slice, life.change_service, life.delete_something))()
        life.universe.run(dice.expovariate(dice.choice((1.0, 10.0, 200.0))))
    if calm and disturb is nothing_happens:
        _judge(life, asked)
    life.recovery = max(life.recovery, 150.0)


def _judge(life: Life, asked: Asked) -> None:
    """See that a switch succeeds that nothing disturbs."""
    result, request = asked.result, asked.request
    expected = {"checked"} if request.dry_run else {"switched", "unchanged"}
    if not request.force:  # tenants' Services may have new Findings
        expected.add("refused")
    if asked.refused or result is None or result.outcome not in expected | {"unchanged"}:
        what = asked.refused or (result and f"{result.outcome}: {result.text}")
        life.node.kernel.fail(f"an undisturbed switch to {request.to} mode ends with {what}")


def serves(node: Node) -> bool:
    """Whether one process runs, and its rules are in force."""
    daemon = node.daemon
    return daemon is not None and len(node.processes) == 1 and daemon.serving.is_set()


def _carry_connections(life: Life) -> None:
    """Have tables carry connections for some time."""
    kernel = life.node.kernel
    for table in kernel.tables:
        if life.dice.random() < 0.5:
            kernel.carried[table] = life.universe.now + life.dice.expovariate(1 / 20.0)
    life.heals.append(kernel.carried.clear)


# Disturbances


def nothing_happens(_life: Life, _asked: Asked) -> None:
    pass


def kernel_is_busy(life: Life, _asked: Asked) -> None:
    """For a moment, or until all is healed."""
    times = life.dice.choice((1, 3, 10_000))
    for operation in ("apply", "read", "counts"):
        if life.dice.random() < 0.6:
            life.node.kernel.faults.append(Fault(operation, "busy", times))
    life.heals.append(life.node.kernel.faults.clear)


def kernel_refuses(life: Life, _asked: Asked) -> None:
    ways = ("refused", "late", "lost", "partly", "partly_refused", "slow", "again")
    for _ in range(life.dice.randint(1, 3)):
        fault = Fault("apply", life.dice.choice(ways), life.dice.choice((1, 2, 10_000)))
        life.node.kernel.faults.append(fault)
    life.heals.append(life.node.kernel.faults.clear)


def kernel_refuses_a_service(life: Life, _asked: Asked) -> None:
    life.node.kernel.poison.add(f"tenant/s{life.dice.randrange(14)}")
    life.heals.append(life.node.kernel.poison.clear)


def canary_fails(life: Life, _asked: Asked) -> None:
    life.node.dial_problem = "no answer in 3 s"

    def heal() -> None:
        life.node.dial_problem = ""

    life.heals.append(heal)


def operator_leaves(_life: Life, asked: Asked) -> None:
    asked.cancel()


def second_request(life: Life, asked: Asked) -> None:
    """Somebody else asks for another switch: it is refused while the first one is under way."""
    if not asked.ended and life.node.daemon is not None:
        other = Asked(life.node, SwitchRequest(life.dice.choice(MODES), watch_seconds=0.0))

        def look() -> None:
            if not (asked.ended or other.ended):
                life.node.kernel.fail("a second switch begins beside the first one")

        life.universe.after(0.01, look)


def process_is_killed(life: Life, _asked: Asked) -> None:
    life.node.kill()


def process_ends(life: Life, _asked: Asked) -> None:
    life.node.terminate()


def configuration_changes(life: Life, _asked: Asked) -> None:
    for section in ("iptables", "nftables"):
        life.node.document[section]["masqueradeAll"] = life.dice.random() < 0.5
    life.oracle.protect()
    life.node.write_config()


DISTURBANCES: tuple[Callable[[Life, Asked], None], ...] = (
    *(nothing_happens, kernel_is_busy, kernel_refuses, kernel_refuses_a_service, canary_fails),
    *(operator_leaves, second_request, process_is_killed, process_ends, configuration_changes),
)
