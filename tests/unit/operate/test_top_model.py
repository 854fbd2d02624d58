"""The screen of `steersman top`: what it shows, and what keys do."""

from __future__ import annotations

import msgspec
import pytest

from steersman.model.drift import Drift, Writer
from steersman.model.findings import Finding, Severity
from steersman.model.node_state import NodeState, SourceStatus
from steersman.model.top import TopRow, TopSample
from steersman.operate import top
from steersman.operate.client import Client
from steersman.operate.top_model import (
    SORTS,
    Command,
    Question,
    TopModel,
    duration,
    keys_of,
    number,
)

NOW = 1_000_000.0
ROWS = (
    TopRow("shop/web:http", "TCP", 3, 1200, 40.25, 3, 1.5, 0.0042),
    TopRow("shop/web:https", "TCP", 3, 10, 0.5, 0, 0.0, None),
    TopRow("mail/smtp", "TCP", 0, 0, 0.0, 0, 0.0, None),
)
ERROR = Finding("Service shop/web", "spec.ports[0]", "taken by another Service", Severity.ERROR)
WARNING = Finding("Service mail/smtp", "", "no endpoints\x1b[2J")


STATE = NodeState(
    node="node-a",
    mode="nftables",
    version="1.0.0",
    pid=42,
    started=NOW - 7200,
    now=NOW,
    revision=8,
    synced_at=NOW - 2,
    sync_reason="changes",
    phases={"plan": 0.001, "apply": 0.003},
    objects=1234,
    services=2,
    service_ports=3,
)


def found(*findings: Finding, warnings: int) -> NodeState:
    counts = {Severity.ERROR: 1, Severity.WARNING: warnings}
    return msgspec.structs.replace(STATE, findings=findings, finding_counts=counts)


def sample(**changes: object) -> TopSample:
    values: dict[str, object] = {
        "status": STATE,
        "counted": True,
        "total": TopRow("all", "", 0, 1210, 40.75, 3, 1.5, 0.0042),
        "open_connections": 7,
        "interval": 1.0,
        "matching": 3,
        "rows": ROWS,
        **changes,
    }
    return TopSample(**values)  # type: ignore[arg-type]


def screen(model: TopModel, width: int = 80, height: int = 24) -> list[str]:
    lines = model.frame(width, height, NOW)
    assert len(lines) == height
    shown = ["".join(text for text, _ in line) for line in lines]
    assert all(len(line) <= width and line.isprintable() for line in shown)
    return shown


def model_of(**changes: object) -> TopModel:
    model = TopModel()
    model.show(sample(**changes))
    return model


def text(model: TopModel) -> str:
    return "\n".join(screen(model))


def press(model: TopModel, *keys: str) -> Command | None:
    """Press keys; the command of the last one."""
    command = None
    for key in keys:
        command = model.key(key)
    return command


def test_the_summary_has_what_matters_first() -> None:
    lines = screen(model_of(status=found(ERROR, warnings=2)))
    assert lines[0] == "steersman 1.0.0, nftables mode, node node-a, pid 42, up 2h"
    assert lines[1] == "  sync      revision 8 (changes), 2s ago, 4.0 ms"
    assert lines[2] == "  source    manifests"
    assert lines[3].endswith("0 EndpointSlices, 3 ServicePorts, 1234 kernel objects")
    assert lines[4] == "  findings  1 error, 2 warnings"
    assert lines[5].startswith(
        "  traffic   40.8 connections/s  7 open  1.5 failed/s  set-up 4.2 ms"
    )


def test_services_in_trouble_are_counted_and_listed() -> None:
    bad = Finding("Service shop/web", "", "no endpoint: clients are rejected", Severity.ERROR)
    state = msgspec.structs.replace(STATE, troubled=(bad,), trouble_counts={Severity.ERROR: 1})
    model = model_of(status=state)
    assert "  trouble   1 Service, 1 without any endpoint" in screen(model)
    press(model, "f")
    assert "Service shop/web: no endpoint: clients are rejected" in text(model)


def test_trouble_is_named() -> None:
    status = NodeState(
        pid=42,
        started=NOW - 10,
        now=NOW,
        healthy=False,
        owes=True,
        synced_at=NOW - 400,
        sync_reason="retry",
        refused=2,
        source=SourceStatus("apiserver", "https://192.0.2.1:6443", connected=False),
        repairs=3,
        drift=Drift(NOW - 30, missing=2, writers=(Writer("nft", 7),)),
    )
    shown = text(
        model_of(
            status=status,
            problem="busy",
            interval=0.0,
            open_connections=None,
        )
    )
    assert "NOT HEALTHY" in shown
    assert "2 refused" in shown
    assert "changes wait" in shown
    assert "https://192.0.2.1:6443, NOT CONNECTED" in shown
    assert "drift     3 repaired, last 30s ago: 2 kernel objects" in shown
    assert "counting...  busy" in shown
    (traffic,) = (line for line in shown.splitlines() if "traffic" in line)
    assert " open" not in traffic


def test_what_is_not_known_is_not_made_up() -> None:
    rows = (TopRow("shop/web", "TCP", 3),)
    shown = text(model_of(counted=False, rows=rows, matching=1, total=TopRow("all")))
    assert "unknown: the nftables mode does not count connections" in shown
    assert shown.splitlines()[8].split() == [">shop/web", "-", "-", "-", "-", "3"]
    assert "no Findings" in shown
    status = NodeState(mode="nftables", started=NOW, now=NOW)
    assert "none has reached the kernel yet" in text(model_of(status=status))
    assert "waiting..." in text(TopModel())


def test_the_table_fits_any_terminal() -> None:
    model = model_of()
    assert screen(model)[7].split() == [
        *("SERVICE", "*PER", "S", "CONNECTIONS", "FAILED/S", "SET-UP", "ENDPOINTS"),
    ]
    assert screen(model)[8].split() == [">shop/web:http", "40.2", "1,200", "1.5", "4.2", "ms", "3"]
    assert screen(model, 30, 24)[7].split() == ["SERVICE", "*PER", "S"]
    assert screen(model, 45, 24)[7].split()[-1] == "ENDPOINTS"
    screen(model, 200, 60)
    screen(model, 3, 2)
    long = TopRow("n" * 63 + "/" + "s" * 63, "TCP", 1)
    assert ".." in screen(model_of(rows=(long,), matching=1))[8]


def test_only_some_rows_fit_and_the_selected_one_is_among_them() -> None:
    rows = tuple(TopRow(f"shop/s{n:03}", "TCP", 1) for n in range(100))
    model = model_of(rows=rows, matching=4000)
    assert "s000" in screen(model)[8]
    assert screen(model)[-2] == " 14 of 4000"
    press(model, *["down"] * 50)
    assert any(line.startswith(">shop/s050") for line in screen(model))
    press(model, "end")
    assert any(line.startswith(">shop/s099") for line in screen(model))
    press(model, "page up")
    assert model.selected == "shop/s085"
    press(model, "home", "page down", "k")
    assert model.selected == "shop/s013"
    model.show(sample())  # fewer rows than before
    assert model.selected == "mail/smtp"


def test_keys_are_about_the_service_that_was_chosen_wherever_its_row_is() -> None:
    model = model_of()
    press(model, "down", "down")
    model.show(sample(rows=(ROWS[2], ROWS[0], ROWS[1])))
    assert any(line.startswith(">mail/smtp") for line in screen(model))
    assert press(model, "d") == Command("doctor", "mail/smtp")
    press(model, "?", "escape", "f", "escape")
    assert model.selected == "mail/smtp"
    assert press(model, "enter") == Command("ask")
    model.show(sample(rows=(), matching=0))
    press(model, "escape")
    model.show(sample())
    assert press(model, "d") == Command("doctor", "mail/smtp")
    both = (TopRow("dns/dns", "TCP", 1), TopRow("dns/dns", "UDP", 1))
    model.show(sample(rows=both))  # what was chosen is gone
    model.show(sample(rows=both[::-1]))
    assert screen(model)[8].startswith(">"), "still the row with UDP"


def test_a_service_is_opened_and_left() -> None:
    model = model_of()
    assert press(model, "j", "enter") == Command("ask")
    assert model.question == Question("rate", "", "shop/web")
    model.show(sample(rows=(TopRow("10.244.0.5:8080", "TCP", 1, 4, 0.5),), matching=1))
    assert "ENDPOINTS of shop/web" in text(model)
    assert press(model, "d") == Command("doctor", "shop/web")
    assert press(model, "/") is None
    assert not model.typing, "endpoints are not filtered"
    assert press(model, "escape") == Command("ask")
    model.show(sample())
    assert model.question.service == ""
    assert any(line.startswith(">shop/web:https") for line in screen(model)), "where it was"
    empty = model_of(rows=(), matching=0)
    assert press(empty, "enter") is None
    assert press(empty, "d") is None
    assert TopModel().selected == ""


def test_the_list_is_filtered_and_sorted() -> None:
    model = model_of()
    assert press(model, "/", "w", "e", "b") == Command("ask")
    assert screen(model)[-1] == "filter: web_"
    assert press(model, "up") == Command("ask"), "keys without a letter change nothing"
    press(model, "backspace", "enter")
    assert model.question.filter == "we"
    model.show(sample(rows=(), matching=0))
    assert "nothing whose name has 'we'" in text(model)
    assert press(model, "escape") == Command("ask")
    assert model.question.filter == ""
    press(model, "/", "x", "escape")
    assert (model.typing, model.question.filter) == (False, "")
    assert press(model, "s") == Command("ask")
    assert model.question.sort == SORTS[1]
    press(model, "S", "S")
    assert model.question.sort == SORTS[-1]


def test_findings_and_help_and_texts() -> None:
    model = model_of(status=found(ERROR, WARNING, warnings=1))
    assert press(model, "f") is None
    shown = text(model)
    assert "error  Service shop/web spec.ports[0]: taken by another Service" in shown
    assert "no endpoints\\x1b[2J" in shown
    assert press(model, "s") is None
    assert press(model, "d") is None, "no Service is selected here"
    press(model, "escape", "?")
    assert "run doctor on the Service" in text(model)
    press(model, "escape")
    model.show_text("doctor shop/web", [f"line {n}\tx" for n in range(100)])
    assert "line 0  x" in text(model)
    press(model, "end")
    assert "line 99" in text(model)
    press(model, "up")
    assert "line 98" in screen(model)[-2]
    assert press(model, "escape") is None
    assert "SERVICE" in text(model)
    press(model, "enter", "h", "escape")
    assert model.view == "endpoints"
    assert TopModel().frame(80, 24, NOW)
    waiting = TopModel()
    press(waiting, "f")
    assert "waiting..." in text(waiting)
    press(waiting, "down")


def test_a_message_is_shown_until_the_next_key() -> None:
    model = model_of()
    model.message = "the process does not answer"
    assert screen(model)[-2] == "the process does not answer"
    assert press(model, " ") == Command("ask")
    assert "answer" not in text(model)
    assert press(model, "q") == Command("quit")
    assert press(model, "z") is None
    assert press(model, "/", "quit") == Command("quit"), "also while a filter is typed"


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1bOA", ["up"]),
        (b"\x1b[5~x", ["page up", "x"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[15;2~", []),
        (b"\x1b[", []),
        (b"\r\x7f\x03", ["enter", "backspace", "quit"]),
        ("ü€".encode(), ["ü", "€"]),
        (b"\xff\x00a", ["a"]),
        (b"\x1bq", ["escape", "q"]),
    ],
)
def test_keys_are_read_from_what_terminals_send(data: bytes, keys: list[str]) -> None:
    assert keys_of(data) == keys


def test_numbers_and_durations_are_short() -> None:
    assert [number(n) for n in (None, 7, 1234, 0.25, 1234.5, 2e6, 3e9)] == [
        *("-", "7", "1,234", "0.2", "1,234.5", "2.0M", "3.0G"),
    ]
    assert [duration(s) for s in (None, 0.0004, 1.5, 119, 120, 7200, 200_000)] == [
        *("-", "0.4 ms", "1.5 s", "119.0 s", "2 min", "2 h", "2 d"),
    ]


class Samples(Client):
    """Answers with one sample after the other; then with the last again."""

    def __init__(self, *samples: TopSample) -> None:
        super().__init__()
        self.left = list(samples)

    def get(self, path: str) -> bytes:
        del path
        return msgspec.msgpack.encode(self.left.pop(0) if len(self.left) > 1 else self.left[0])


async def test_one_screen_has_rates_however_long_it_takes_to_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process pauses for longer than a second after a count that took long."""
    monkeypatch.setattr(top, "_APART", 0.0)
    once, twice = sample(interval=0.0), sample(interval=4.0)
    answer = await top.top_once(Question(), Samples(once, once, once, twice))
    assert answer.sample.interval == 4.0


@pytest.mark.parametrize(
    "without", [sample(interval=0.0, problem="it is busy"), sample(interval=0.0, counted=False)]
)
async def test_one_screen_without_rates_that_do_not_come(without: TopSample) -> None:
    answer = await top.top_once(Question(), Samples(without, sample()))
    assert answer.sample == without


async def test_one_screen_does_not_wait_for_rates_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_APART", 0.0)
    monkeypatch.setattr(top, "_PATIENCE", 0.01)
    answer = await top.top_once(Question(), Samples(sample(interval=0.0)))
    assert not answer.sample.interval
