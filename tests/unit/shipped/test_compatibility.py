"""docs/compatibility.md names everything that differs from upstream, and its claims are true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from steersman.config.flags import UPSTREAM as FLAGS
from steersman.config.types import ProxyConfig, Section
from steersman.modes.specs import SPECS
from steersman.run.observe.metric_table import DECLARED
from steersman.run.observe.metrics import Metrics
from steersman.run.observe.mode_metrics import ModeMetrics
from steersman.run.observe.observers import SyncObservers
from steersman.run.observe.prometheus import exposition
from steersman.run.observe.scraped import NFACCT, feature_gates, nfacct_packets, source_state
from steersman.run.serve.health import ProxyHealth, proxy_health_app
from steersman.run.serve.metrics_server import Pages, metrics_app
from steersman.run.sync.in_force import InForce
from steersman.source.stats import SourceStats
from steersman.source.store import Store
from tests.support.http import ask, serving
from tests.support.modes.bare import BareMode

PAGE = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text()
UPSTREAM = Path(__file__).parents[2] / "data" / "upstream" / "golden"
STATES = {"same", "more", "differs", "no effect", "absent"}
REASONS = {"more", "differs", "no effect", "absent"}


class Row(NamedTuple):
    cells: list[str]

    @property
    def state(self) -> str:
        return self.cells[-2]


def rows(section: str) -> list[Row]:
    """The rows of a section's table, without its head."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [Row([cell.strip() for cell in line.strip("|").split("|")]) for line in lines]


def named(section: str, column: int = 0) -> dict[str, Row]:
    """A section's rows by the text of a column, which must differ."""
    found = [(name, row) for row in rows(section) for name in _words(row.cells[column])]
    assert len(found) == len(dict(found)), "a row is there twice"
    return dict(found)


def _words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def fields(part: Section, prefix: str = "") -> Iterator[str]:
    """Paths of the document's fields, in its order, but for our own block."""
    for field in msgspec.structs.fields(part):
        value, path = getattr(part, field.name), prefix + field.encode_name
        if isinstance(value, Section):
            yield from fields(value, path + ".")
        else:
            yield path


SECTIONS = ("Modes", "Flags", "Configuration file", "Metrics", "Endpoints", "Events", "Process")


@pytest.mark.parametrize("section", SECTIONS)
def test_every_row_has_a_state_and_a_reason(section: str) -> None:
    position = {"Modes": 2, "Endpoints": 2, "Events": 2}.get(section, 1)
    for row in rows(section):
        state, remark = row.cells[position], row.cells[position + 1]
        assert state in STATES, row
        assert remark or state not in REASONS, row


def in_order(section: str, names: list[str]) -> bool:
    """Whether a section names only these, in their order; those that it omits are the same."""
    listed = list(named(section))
    return len(listed) > 10 and listed == [name for name in names if name in listed]


def test_flags_that_differ_are_upstreams() -> None:
    assert in_order("Flags", [f"--{name}" for name in sorted(FLAGS)])


def test_fields_that_differ_are_upstreams() -> None:
    wanted = [path for path in fields(ProxyConfig()) if not path.startswith("steersman")]
    assert in_order("Configuration file", wanted)


def test_metrics_that_differ_are_upstreams() -> None:
    ours = {metric.name for metric in DECLARED if metric.name.startswith("kubeproxy_")}
    listed = {name for name in named("Metrics") if name.startswith("kubeproxy_")}
    assert listed
    assert listed <= ours


def scrape(mode: str) -> str:
    stats = SourceStats()
    stats.requests.count("200", "GET", "10.0.0.1:6443")
    stats.requests.took(0.1, "GET", "10.0.0.1:6443")
    metrics = Metrics(mode)
    SyncObservers(Store(), InForce(), metrics, ProxyHealth(60.0), {}, mode=BareMode())
    metrics.on_scrape(lambda: source_state(stats, 0.0))
    metrics.on_scrape(lambda: feature_gates({}))
    metrics.on_scrape(lambda: nfacct_packets(dict.fromkeys(NFACCT, 0)))
    return b"".join(exposition(metrics.collect())).decode()


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_every_family_of_upstream_is_there_or_the_page_says_why_not(mode: str) -> None:
    golden = (UPSTREAM / mode / "metrics-names-types.txt").read_text()
    families = re.findall(r"^((?:kubeproxy|rest_client|process)_\S+) (\S+)$", golden, re.MULTILINE)
    assert {name.partition("_")[0] for name, _ in families} == {"kubeproxy", "rest", "process"}
    absent = {name for name, row in named("Metrics").items() if row.state == "absent"}
    ours = re.findall(r"^# TYPE (\S+) (\S+)$", scrape(mode), re.MULTILINE)
    for name, kind in families:
        assert ((name, kind) in ours) == (name not in absent), name


@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_metrics_of_other_components(mode: str) -> None:
    """What the page says of metrics that are not kube-proxy's alone."""
    text = scrape(mode)
    for name, row in named("Metrics").items():
        if not name.startswith("kubeproxy_") and not name.startswith("kubernetes_healthcheck"):
            there = re.search(rf"^{name.replace('*', '')}", text, re.MULTILINE) is not None
            assert there == (row.state != "absent"), name


def test_modes_are_as_the_registry_has_them() -> None:
    listed = {name for name, row in named("Modes").items() if row.state != "absent"}
    assert listed == set(SPECS), "say in docs/compatibility.md, Modes, which modes are there"


async def test_every_endpoint() -> None:
    """Paths that the page calls absent are not served, and all others are."""
    metrics = metrics_app(
        Pages(
            Metrics("iptables"),
            lambda: "iptables",
            configz=lambda: b"{}",
            flags=lambda: "",
            state=lambda: iter([b"{}"]),
            services=ModeMetrics(BareMode(), tuple, lambda: False).services,
            profiling=True,
        )
    )
    health = proxy_health_app(ProxyHealth(60.0), lambda: None)
    for server, app in (("metrics, 10249", metrics), ("healthz, 10256", health)):
        async with serving(app) as port:
            for row in rows("Endpoints"):
                path = next(iter(_words(row.cells[1])), "")
                if row.cells[0] == server and not path.endswith("/profile"):
                    reply = await ask(port, path)
                    assert (reply.status == 404) == (row.cells[2] == "absent"), path


def test_every_event() -> None:
    """The reasons on the page are written down in the program, but for absent ones."""
    sources = Path(__file__).parents[3].glob("src/steersman/**/*.py")
    text = "".join(path.read_text() for path in sources)
    for reason, row in named("Events").items():
        tail = reason.removeprefix("FailedToStart")
        assert (f'"{tail}"' in text or f'"{reason}"' in text) == (row.cells[2] != "absent"), reason
