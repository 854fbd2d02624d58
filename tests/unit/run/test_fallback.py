"""What runs where the mode that was asked for cannot."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import pytest

from steersman.config import parse_command_line
from steersman.host.exec import Result
from steersman.host.netlink import NetlinkError
from steersman.modes.base import Support
from steersman.modes.ipvs import probe
from steersman.modes.ipvs.probe import check_ipset, check_matches, find_family, load_module
from steersman.netfilter.iptables.tool import Iptables, Tool
from steersman.run.observe.events import Recorder
from steersman.run.observe.metrics import Metrics
from steersman.run.process.startup import Chosen, StartError, choose_mode, report_fallback
from steersman.source.store import Store
from tests.support.modes.inline import Inline
from tests.support.samples import value_of


class Stub:
    worker = Inline()

    def __init__(self, name: str, *missing: str, usable: bool = True) -> None:
        self.name = name
        self.support = Support(usable, missing)

    def probe(self) -> Support:
        return self.support


def stub(name: str, *missing: str, usable: bool = True) -> Any:
    return Stub(name, *missing, usable=usable)


async def chosen(*modes: Any, strict: bool = False) -> Chosen:
    """Choose among these modes, of which the first is configured."""
    by_name = {mode.name: mode for mode in modes}
    flags = [f"--proxy-mode={modes[0].name}", *(["--strict"] if strict else [])]
    return await choose_mode(parse_command_line(flags).config, lambda name, *_: by_name[name])


async def test_the_mode_asked_for_if_it_can() -> None:
    ipvs = stub("ipvs", "IPv6 is not served.")
    assert await chosen(ipvs) == Chosen(ipvs, "ipvs")


async def test_iptables_for_ipvs(caplog: pytest.LogCaptureFixture) -> None:
    iptables = stub("iptables")
    found = await chosen(stub("ipvs", "No ip_vs.", usable=False), iptables)
    assert found == Chosen(iptables, "ipvs", ("No ip_vs.",))
    assert found.sentence == "mode ipvs cannot run here; iptables serves instead. No ip_vs."
    assert caplog.messages == [found.sentence]


@pytest.mark.parametrize(("name", "strict"), [("ipvs", True), ("nftables", False)])
async def test_nothing_stands_in(name: str, strict: bool) -> None:
    with pytest.raises(StartError, match=f"^{name} mode cannot run here: No.$"):
        await chosen(stub(name, "No.", usable=False), strict=strict)


async def test_what_stands_in_cannot_run_either() -> None:
    other = stub("iptables", "Nor this.", usable=False)
    with pytest.raises(StartError, match=r"^ipvs mode cannot run here: No\. Nor this\.$"):
        await chosen(stub("ipvs", "No.", usable=False), other)


class Poster:
    def __init__(self) -> None:
        self.events: list[Any] = []

    async def post_event(self, _namespace: str, event: Any) -> None:
        self.events.append(event)


def told(chosen: Chosen) -> tuple[Store, Metrics, Recorder]:
    store, metrics, recorder = Store("n"), Metrics("iptables"), Recorder(Poster(), "n")
    report_fallback(chosen, recorder, store, metrics)
    return store, metrics, recorder


def test_it_is_said_in_three_places() -> None:
    store, metrics, recorder = told(Chosen(stub("iptables"), "ipvs", ("No ip_vs.",)))
    (finding,) = store.findings
    assert "No ip_vs." in finding.reason
    labels = {"wanted": "ipvs", "used": "iptables"}
    assert value_of(metrics.collect(), "steersman_mode_fallback", labels) == 1
    assert recorder._queue.qsize() == 1


def test_nothing_is_said_of_what_was_asked_for() -> None:
    store, _, recorder = told(Chosen(stub("ipvs"), "ipvs"))
    assert store.findings == ()
    assert recorder._queue.empty()


class Says:
    """Answers every command with what was prepared."""

    def __init__(self, *results: Result | Exception) -> None:
        self._results = list(results)
        self.asked: list[list[str]] = []

    async def run(self, argv: Sequence[str], *_args: object, **_more: object) -> Result:
        return self.run_tool(argv)

    def run_tool(self, argv: Sequence[str], *_args: object, **_more: object) -> Result:
        self.asked.append(list(argv))
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_a_module_that_cannot_be_had() -> None:
    assert load_module(Says(Result(0, b"", b"")), "ip_vs") == ""
    assert load_module(Says(Result(1, b"", b"not found\n")), "ip_vs") == "not found"
    assert "failed" in load_module(Says(Result(1, b"", b"")), "ip_vs")
    assert "modprobe" in load_module(Says(FileNotFoundError("modprobe")), "ip_vs")


def test_an_ipset_that_will_not_do() -> None:
    version = Result(0, b"ipset v7.17, protocol version: 7\n", b"")
    assert check_ipset(Says(version, Result(0, b"", b""))) == ""
    assert "modprobe ip_set" in check_ipset(Says(version, Result(1, b"", b"")))
    assert "too old" in check_ipset(Says(Result(0, b"ipset v4.5, protocol", b"")))
    assert "not installed" in check_ipset(Says(FileNotFoundError("ipset")))


class Resolves:
    """Stands in for the question for the IPVS family: refused until a module is loaded."""

    def __init__(self, *codes: int) -> None:
        self._codes = list(codes)

    def __call__(self, _netlink: object) -> int:
        if code := self._codes.pop(0):
            raise NetlinkError(code, "refused")
        return 27


OK = Result(0, b"", b"")
NO_MODULE = Result(1, b"", b"FATAL: Module ip_vs not found\n")


@pytest.mark.parametrize(
    ("codes", "loads", "answer", "asked", "found"),
    [
        ((0,), True, OK, [], (27, "")),
        ((errno.ENOENT, 0), True, OK, [["modprobe", "ip_vs"]], (27, "")),
        ((errno.ENOENT, errno.ENOENT), True, NO_MODULE, [["modprobe", "ip_vs"]], (0, "not found")),
        ((errno.ENOENT, errno.ENOENT), False, OK, [], (0, "modprobe ip_vs")),
        ((errno.EPERM,), True, OK, [], (0, "does not answer about IPVS")),
    ],
)
def test_the_module_is_loaded_where_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
    codes: tuple[int, ...],
    loads: bool,
    answer: Result,
    asked: list[list[str]],
    found: tuple[int, str],
) -> None:
    monkeypatch.setattr(probe, "resolve", Resolves(*codes))
    says = Says(answer)
    family, said = find_family(says, object(), loads=loads)  # type: ignore[arg-type]
    assert (family, says.asked) == (found[0], asked)
    assert found[1] in said
    assert bool(said) == (not family)


HELD = Result(4, b"", b"Another app is currently holding the xtables lock.\n")


def matches(says: Says) -> str:
    """The sentence about the matches of iptables-legacy."""
    return check_matches(says, Iptables(says, Tool("iptables", "legacy", (1, 8, 9))))


def test_a_held_lock_is_no_reason_for_another_mode() -> None:
    moment = Says(OK, HELD, HELD, OK, OK)
    assert matches(moment) == ""
    assert [argv[0] for argv in moment.asked] == ["ipset", *["iptables-restore"] * 3, "ipset"]
    assert moment.asked[1][1:3] == ["-w", "5"]
    assert matches(Says(OK, HELD, HELD, HELD, OK)) == "", "it may be held for long"
    lacking = Says(OK, HELD, Result(2, b"", b"Couldn't load match `set'\n"), OK)
    assert "`set'" in matches(lacking)


def test_matches_that_iptables_lacks() -> None:
    assert matches(Says(OK, OK, OK)) == ""
    lacking = Says(OK, Result(2, b"", b"Couldn't load match `bpf'\n"), OK)
    said = matches(lacking)
    assert "`bpf'" in said
    assert "modprobe xt_bpf" in said
    assert [argv[0] for argv in lacking.asked] == ["ipset", "iptables-restore", "ipset"]
