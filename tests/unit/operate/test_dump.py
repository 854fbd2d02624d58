"""What the kernel has for a Service, compared with the plan: with every mode, on a fake kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from steersman.cli.output import plain_lines
from steersman.config.types import ProxyConfig
from steersman.host.exec import SubprocessExec
from steersman.model.errors import BusyError
from steersman.model.names import ObjectName, Protocol
from steersman.model.ruleset import Ruleset
from steersman.model.world import World
from steersman.modes.base import Mode, Support
from steersman.modes.ipvs.objects import MemberKey, ServerKey
from steersman.modes.nftables.layout import Kind, pack_address, pack_port, prefix
from steersman.operate import dump
from steersman.operate.answer import QuestionError
from steersman.operate.dump import KernelDump, KernelLine, compare, find_service
from tests.support.builders.doctor import CART, world_of
from tests.support.builders.objects import CONFIG, KEY, NODE, endpoint, port, service, slice_
from tests.support.modes.ipvs import IPVS
from tests.support.modes.memory import MemoryMode
from tests.support.modes.registry import EBPF, IPTABLES, MODES, NFTABLES, ModeUnderTest, render

Kernel = dict[Any, Any]
ENDS = [endpoint("10.1.0.1", NODE), endpoint("10.1.0.2", "node-2")]


def shop(mode: Mode, **spec: Any) -> World:
    """shop/cart, and shop/web, which is none of its business."""
    other = service("web", clusterIP="10.96.0.20")
    ends = slice_(*ENDS), slice_(*ENDS, name="web-1", owner="web")
    return world_of(service(**spec), other, *ends, mode=mode.name, traits=mode.traits)


def lines_of(
    under_test: ModeUnderTest,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Kernel], object] = lambda _: None,
    **spec: Any,
) -> list[KernelLine]:
    """The lines if the kernel has what the plan says, and a change by another program."""
    mode = under_test.offline()
    world = shop(mode, **spec)
    words = mode.words
    kernel = dict(words.wanted(render(world.plan, mode), {}))
    change(kernel)

    async def read() -> Ruleset:
        return kernel

    monkeypatch.setattr(words, "read", read)
    monkeypatch.setattr(words, "beyond", lambda *_: [])
    monkeypatch.setattr(mode, "words", words)
    return asyncio.run(compare(world, CART, mode))


def marked(lines: list[KernelLine]) -> list[tuple[str, str]]:
    return [(line.state, line.text) for line in lines if line.state != "planned"]


@pytest.mark.parametrize("under_test", [*MODES.values(), IPVS], ids=lambda m: m.name)
def test_a_kernel_that_follows_the_plan_has_no_marked_line(
    under_test: ModeUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [port(nodePort=30080)]
    spec: Any = {"type": "NodePort", "ports": ports, "sessionAffinity": "ClientIP"}
    lines = lines_of(under_test, monkeypatch, **spec)
    assert lines
    assert not marked(lines)
    text = "\n".join(f"{line.place} {line.text}" for line in lines)
    assert "10.96.0.20" not in text
    if under_test.name != "userspace":  # its listeners know the endpoints, the kernel does not
        assert "10.1.0.2" in text


def chain_of_cart(kernel: Kernel, start: str) -> Any:
    """The key of a chain of shop/cart."""
    return next(k for k, v in kernel.items() if k[2].startswith(start) and "shop/cart" in v)


def test_a_missing_rule_and_a_foreign_one_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def meddle(kernel: Kernel) -> None:
        pool = chain_of_cart(kernel, "KUBE-SVC-")
        kernel[pool] = "\n".join(kernel[pool].split("\n")[:-1])
        drop, other = (f"-A KUBE-SERVICES -d 10.96.0.{n}/32 -j DROP" for n in (10, 99))
        kernel[4, "nat", "KUBE-SERVICES", "unknown"] = drop
        kernel[4, "filter", "KUBE-SERVICES", "unknown"] = other

    states = marked(lines_of(IPTABLES, monkeypatch, meddle))
    (missing,) = [text for state, text in states if state == "missing"]
    assert "-> 10.1.0.2:8080" in missing
    unexpected = [text for state, text in states if state == "unexpected"]
    assert unexpected == ["-A KUBE-SERVICES -d 10.96.0.10/32 -j DROP"]


def test_the_order_of_rules_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(kernel: Kernel) -> None:
        key = chain_of_cart(kernel, "KUBE-SEP-")
        kernel[key] = "\n".join(reversed(kernel[key].split("\n")))

    states = [state for state, _ in marked(lines_of(IPTABLES, monkeypatch, turn))]
    assert sorted(states) == ["missing", "unexpected"]


@pytest.mark.parametrize("lost", ["split", "KUBE-SVC-BYADDR-0"])
def test_a_split_list_of_services_is_followed_to_the_address(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = IPTABLES.offline()
    config = msgspec.structs.replace(CONFIG, split_threshold=1)
    other = service("web", clusterIP="10.96.0.20")
    world = world_of(service(), other, slice_(*ENDS), mode=mode.name, config=config)
    assert world.plan.settings.split_dispatch
    kernel = dict(render(world.plan, mode))

    monkeypatch.setattr(mode, "read", lambda: kernel)
    lines = asyncio.run(compare(world, CART, mode))
    assert not marked(lines)
    buckets = [line.text for line in lines if "BYADDR" in line.text and " -j " in line.text]
    assert [text.rpartition(" ")[2] for text in buckets if "-d 0.0.0." in text] == [
        "KUBE-SVC-BYADDR-0",
        "KUBE-SVC-BYADDR-0a",
    ]
    gone = next(key for key in kernel if key[0] == 4 and lost in (key[2], key[3]))
    del kernel[gone]
    assert {state for state, _ in marked(asyncio.run(compare(world, CART, mode)))} == {"missing"}


def test_flushed_jumps_of_the_node_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(kernel: Kernel) -> None:
        del kernel[4, "nat", "PREROUTING", "jumps"]

    states = marked(lines_of(IPTABLES, monkeypatch, flush))
    assert [state for state, _ in states] == ["missing"]
    assert "-A PREROUTING" in states[0][1]


def test_elements_of_nftables_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    destination = pack_address("10.96.0.10") + bytes((6, 0, 0, 0)) + pack_port(80)
    slots = prefix(Kind.SERVICE_ENDPOINTS, KEY.family) + destination

    def meddle(kernel: Kernel) -> None:
        first, second = sorted(key for key in kernel if key.startswith(slots))
        kernel[first] = kernel[second]
        kernel[prefix(Kind.FIREWALL_IPS, KEY.family) + destination] = b""

    states = marked(lines_of(NFTABLES, monkeypatch, meddle))
    assert {state for state, _ in states} == {"missing", "unexpected"}
    assert len(states) == 3
    assert ("unexpected", "10.96.0.10 . tcp . 80") in states


def test_servers_and_entries_of_ipvs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def meddle(kernel: Kernel) -> None:
        del kernel[ServerKey(Protocol.TCP, "10.96.0.10", 80)]
        kernel[MemberKey("KUBE-IPVS-NODE-DROP", "10.96.0.10,6:80")] = ""

    states = marked(lines_of(IPVS, monkeypatch, meddle))
    assert ("unexpected", "10.96.0.10,tcp:80") in states
    assert [text for state, text in states if state == "missing"] == [
        "TCP  10.96.0.10:80 rr",
        "10.96.0.10 on the interface",
        "  -> 10.1.0.1:8080  Masq  1",
        "  -> 10.1.0.2:8080  Masq  1",
    ]


def test_entries_of_maps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def meddle(kernel: Kernel) -> None:
        for key in [k for k in kernel if k[:1] == b"F"]:
            del kernel[key]

    states = marked(lines_of(EBPF, monkeypatch, meddle))
    assert [state for state, _ in states] == ["missing"]
    assert "10.96.0.10:80/TCP" in states[0][1]


def test_what_another_service_wants_is_not_unexpected(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = MemoryMode()
    world = shop(mode)
    mode.kernel = dict(render(world.plan, mode)) | {"of cart": "odd", "nobody's": "odd"}

    words = mode.words
    keys = [*render(world.plan, mode), "of cart"]
    monkeypatch.setattr(words, "of_services", lambda *_: iter(keys))
    monkeypatch.setattr(mode, "words", words)
    lines = asyncio.run(compare(world, CART, mode))
    assert marked(lines) == [("unexpected", "odd")]


@pytest.mark.parametrize("word", ["shop/cart", "cart.shop", "svc/shop/cart"])
def test_a_service_is_found_by_what_operators_type(word: str) -> None:
    assert find_service(shop(MemoryMode()), word) == CART
    assert find_service(shop(MemoryMode()), "cart", "shop") == CART


@pytest.mark.parametrize(
    ("word", "says"),
    [("shop/catr", "similar: shop/cart"), ("10.96.0.10", "is not a Service .address.")],
)
def test_what_is_no_service_is_refused(word: str, says: str) -> None:
    with pytest.raises(QuestionError, match=says):
        find_service(shop(MemoryMode()), word)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (ObjectName("shop", "nobody"), "Service shop/nobody is not known"),
        (ObjectName("shop", "pods"), "Service shop/pods is not served here: headless"),
    ],
)
def test_a_service_without_a_plan_has_nothing(name: ObjectName, says: str) -> None:
    mode = MemoryMode()
    pods = service("pods", clusterIP="None")
    world = world_of(service(), unserved={ObjectName("shop", "pods"): pods})
    with pytest.raises(QuestionError, match=says):
        asyncio.run(compare(world, name, mode))


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (Support(usable=False, missing=("No tool.",)), "the kernel cannot be read: No tool."),
        (BusyError("locked"), "the kernel cannot be read: locked$"),
        (FileNotFoundError("pins"), "the memory mode does not run here: pins"),
    ],
)
def test_a_kernel_that_cannot_be_read_is_an_error(
    failure: Support | Exception, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = MemoryMode()

    def probe() -> Support:
        if isinstance(failure, Exception):
            raise failure
        return failure

    monkeypatch.setattr(mode, "probe", probe)
    monkeypatch.setattr(dump, "create", lambda *_: mode)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(QuestionError, match=says):
        asyncio.run(dump.dump_service(shop(mode), CART, ProxyConfig()))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    hint = "; this needs root" if isinstance(failure, BusyError) else ""
    with pytest.raises(QuestionError, match=says.replace("$", hint)):
        asyncio.run(dump.dump_service(shop(mode), CART, ProxyConfig()))


def test_a_service_that_changes_meanwhile_is_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mode = MemoryMode()
    old, new = shop(mode), shop(mode, ports=[port(number=81)])
    mode.kernel = dict(render(new.plan, mode))
    monkeypatch.setattr(dump, "create", lambda *_: mode)

    def dumped(now: World) -> KernelDump:
        async def renew(_: World) -> World:
            return now

        return asyncio.run(dump.dump_service(old, CART, ProxyConfig(), renew=renew))

    assert dumped(new).exit_code == 0
    assert (dumped(old).exit_code, mode.reads) == (1, 3)


def test_a_line_that_a_disturbed_reading_missed_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Disturbed(MemoryMode):
        changes_during_read = 2
        misses = 1

        def read(self) -> Ruleset:
            found = dict(super().read())
            if self.reads <= self.misses:
                del found["clusterIP 10.96.0.10:80"]
            return found

    mode = Disturbed()
    now = shop(mode)
    mode.kernel = dict(render(now.plan, mode))
    monkeypatch.setattr(dump, "create", lambda *_: mode)

    async def renew(_: World) -> World:
        return now

    def dumped(misses: int) -> KernelDump:
        mode.reads, mode.misses = 0, misses
        return asyncio.run(dump.dump_service(now, CART, ProxyConfig(), renew=renew))

    found = dumped(1)
    assert (found.exit_code, found.changes, mode.reads) == (0, 2, 2)
    text = "the rules changed 2 times while they were read: a line that no plan asks for may have"
    assert any(line.startswith(text) for line in plain_lines(found.blocks(False)))
    assert (dumped(9).missing, mode.reads) == (1, 2)


def test_chains_of_nftables_are_followed_from_the_elements_that_go_to_them() -> None:
    mode = NFTABLES.offline()
    world = shop(mode)
    plans = [plan for key, plan in world.plan.services.items() if key.name.object_name == CART]
    settings = world.plan.settings
    rendered = mode.render_service(plans[0], settings)
    lines = [line for key, value in rendered.items() for line in mode.words.words(key, value)]
    found = mode.words.beyond(lines, plans, settings)
    listed = "\n".join(f"{line.place}: {line.text}" for line in found)
    assert "table ip kube-proxy, chain nat-prerouting: ip daddr . meta l4proto" in listed
    assert "table ip kube-proxy, chain lb-1: dnat ip to ip daddr . meta l4proto" in listed
    assert "chain by-source" not in listed, "no element goes there"


def test_chains_of_nftables_are_followed_from_those_of_session_affinity() -> None:
    mode = NFTABLES.offline()
    world = shop(mode)
    (plan, *_) = [plan for key, plan in world.plan.services.items() if key.name.object_name == CART]
    sticky = msgspec.structs.replace(plan, affinity_seconds=60)
    rendered = mode.render_service(sticky, world.plan.settings)
    lines = [line for key, value in rendered.items() for line in mode.words.words(key, value)]
    assert any(line.text.startswith("lookup tcp ") for line in lines)
    found = mode.words.beyond(lines, [sticky], world.plan.settings)
    assert any(line.place == "table ip kube-proxy, chain lb-1" for line in found)


def test_purposes_stand_once_above_the_lines_that_share_them() -> None:
    made = KernelDump(
        service="shop/cart",
        mode="memory",
        lines=(
            KernelLine("chain A", "one", "does something", "planned"),
            KernelLine("chain A", "two", "does something", "missing"),
            KernelLine("chain A", "three", "", "unexpected"),
            KernelLine("chain B", "four", "does something", "context"),
        ),
    )
    assert list(plain_lines(made.blocks(False))) == [
        "chain A",
        "    # does something",
        "    one",
        "  - two",
        "  + three",
        "chain B",
        "    # does something",
        "    four",
        "differs from the plan: lines missing (-): 1, unexpected (+): 1",
    ]
    assert made.exit_code == 1
    assert msgspec.to_builtins(made.data)["lines"][1]["state"] == "missing"
    fine = KernelDump(service="shop/cart", mode="memory", lines=made.lines[:1])
    assert fine.exit_code == 0
    assert list(plain_lines(fine.blocks(False)))[-1] == "as planned: 1 lines of the memory mode"


def test_the_variant_in_force_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the World; else the first that the kernel has objects of; else the usual one."""
    chosen: list[Any] = []

    class Some(MemoryMode):
        def __init__(self, options: Any) -> None:
            super().__init__()
            self.options = options

        def find_leftovers(self, families: object) -> str:
            del families
            return "some" if self.options.iptables_variant == "legacy" and self.left else ""

        left = True

    def create(_name: str, _execute: object, options: Any) -> Mode:
        chosen.append(options)
        return Some(options)

    monkeypatch.setattr(dump, "create", create)

    def variant(**fields: Any) -> str:
        world = world_of(service(), mode="iptables", **fields)
        mode = dump.mode_of(world, ProxyConfig(), SubprocessExec())
        assert isinstance(mode, Some)
        return str(mode.options.iptables_variant)

    assert variant(variant="nft") == "nft"
    assert variant() == "legacy"
    Some.left = False
    assert variant() == ""
    assert all(options.asked_for == "" for options in chosen)
