"""The rows and the registry of modes, and that CONTRIBUTING tells how to add one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import textwrap
from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest

import steersman.modes
from steersman.config import Parsed, parse_command_line
from steersman.host.exec import SubprocessExec
from steersman.modes import ebpf, specs
from steersman.modes.base import Mode
from steersman.modes.registry import create, may_have_left
from steersman.modes.specs import SPECS, ModeOptions, ModeSpec, Variant
from steersman.run.observe.metric_table import DECLARED
from steersman.run.process.assemble import assemble
from steersman.run.process.daemon import Stop
from steersman.run.process.klog import ProcessLog
from steersman.run.process.machine import Machine
from tests.support.waiting import until

CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_rows_agree_with_the_rest_of_the_program(spec: ModeSpec) -> None:
    assert set(spec.metrics) <= {metric.name for metric in DECLARED}
    assert {spec.failure_metric, spec.partial_failure_metric} <= {"", *spec.metrics}
    assert spec.fallback == "" or SPECS[spec.fallback].platform == spec.platform
    fields = ModeOptions.__struct_fields__
    for variant in (*spec.variants, *spec.cleanup_variants):
        assert set(variant.options) <= set(fields)
        assert variant.of(ModeOptions()).leftovers


@pytest.mark.parametrize("name", SPECS)
def test_every_row_has_a_mode(name: str) -> None:
    if sys.platform == "win32":
        pytest.skip("modes of Linux cannot be imported")
    mode = create(name, SubprocessExec(), ModeOptions(leftovers=True))
    assert (mode.name, mode.connection_table is not None) == (name, name == "ebpf")


def test_ranks_of_clean_up_differ() -> None:
    ranks = [spec.cleanup_rank for spec in SPECS.values() if spec.cleanup_rank]
    assert len(ranks) == len(set(ranks))


def test_the_defaults_of_a_row_do_nothing() -> None:
    assert specs.spec_of("unknown") == ModeSpec("unknown", variants=(Variant(),))


def test_a_mode_has_eleven_methods() -> None:
    methods = {n for n, each in vars(Mode).items() if isfunction(each) and not n.startswith("_")}
    assert len(methods) == 11
    section = CONTRIBUTING.read_text().partition("## Add a mode")[2].partition("\n## ")[0]
    told = {name for name in methods if f"`{name}`" in section or f"def {name}(self" in section}
    assert told == methods


@pytest.fixture
def dummy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mode of CONTRIBUTING.md, added as it says: a folder and a row."""
    section = CONTRIBUTING.read_text().partition("## Add a mode")[2].partition("\n## ")[0]
    mode, row = (textwrap.dedent(b.partition("```")[0]) for b in section.split("```python\n")[1:])
    folder = tmp_path / "modes" / "dummy"
    folder.mkdir(parents=True)
    (folder / "mode.py").write_text(mode)
    monkeypatch.setattr(
        steersman.modes, "__path__", [*steersman.modes.__path__, str(folder.parent)]
    )
    spec: ModeSpec = eval(row, {"ModeSpec": ModeSpec})  # our own documentation
    monkeypatch.setitem(SPECS, spec.name, spec)
    yield
    for name in [name for name in sys.modules if name.startswith("steersman.modes.dummy")]:
        del sys.modules[name]


def manifests(folder: Path) -> Path:
    """A Service with an endpoint, as a file."""
    port = {"name": "http", "port": 80, "targetPort": 8080, "protocol": "TCP"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "shop", "name": "cart"},
        "spec": {"clusterIP": "10.96.0.10", "ports": [port]},
    }
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": "shop",
            "name": "cart-1",
            "labels": {"kubernetes.io/service-name": "cart"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.244.0.5"], "conditions": {"ready": True}}],
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
    }
    path = folder / "manifests.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, slice_]}))
    return path


def daemon_flags(path: Path) -> Parsed:
    return parse_command_line(
        [
            "--proxy-mode=dummy",
            f"--manifests={path}",
            "--hostname-override=me",
            "--metrics-bind-address=",
            "--healthz-bind-address=",
        ]
    )


@pytest.mark.usefixtures("dummy")
async def test_a_mode_is_a_folder_and_a_row(tmp_path: Path) -> None:
    made: list[Mode] = []

    def note(name: str, execute: Any, options: ModeOptions) -> Mode:
        made.append(create(name, execute, options))
        return made[-1]

    parsed = daemon_flags(manifests(tmp_path))
    machine = Machine(
        create_mode=note,
        set_conntrack=lambda *_: None,
        allow_localhost_node_ports=lambda node, *_: node,
        set_oom_score=lambda _: "",
        memory_when_loaded=lambda: None,
    )
    stop = Stop()
    daemon = await assemble(
        parsed,
        ProcessLog(stream=io.StringIO(), root=logging.Logger("unused")),
        machine,
        stop,
    )
    running = asyncio.create_task(daemon.run())
    mode: Any = made[0]
    await until(lambda: len(mode.kernel) > 1)
    stop.request()
    await running
    assert mode.kernel["node"] == "me"
    assert ["10.244.0.5:8080"] in mode.kernel.values()


def test_a_mode_in_the_package_of_another_may_have_left_something() -> None:
    assert may_have_left("winuserspace", ModeOptions())


def test_pins_say_whether_the_ebpf_mode_may_have_left_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ebpf, "PINS", tmp_path / "pins")
    assert not may_have_left("ebpf", ModeOptions())
    (tmp_path / "pins").mkdir()
    assert may_have_left("ebpf", ModeOptions())
    monkeypatch.setattr(ebpf, "PINS", tmp_path / ("x" * 300))
    assert may_have_left("ebpf", ModeOptions()), "it cannot be looked at"
    assert may_have_left("iptables", ModeOptions()), "nobody knows without the mode"
