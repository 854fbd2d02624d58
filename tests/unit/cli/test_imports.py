"""The process imports nothing that the running mode does not use: a module takes 50 to 500 kB."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

UNUSED = (
    "aiohttp",
    "bz2",
    "cProfile",
    "difflib",
    "email",
    "http.client",
    "jinja2",
    "lzma",
    "opentelemetry",
    "pkgutil",
    "prometheus_client",
    "shutil",
    "steersman.operate",
    "steersman.run.change_trace",
    "steersman.source.files",
    "steersman.ui",
    "tempfile",
    "unittest",
    "urllib.request",
    "yaml",
    "zoneinfo",
)
"""Packages and modules that no mode needs."""
RARELY_USED = {
    "steersman.modes.netfilter_tracer": ("ipvs",),
    "steersman.netfilter.rule_text": ("iptables", "ipvs", "userspace"),
    "steersman.proxy.engine": ("userspace",),
}
"""Modules that only these modes need before somebody asks for something."""
MODES = ("ebpf", "iptables", "ipvs", "nftables", "userspace")
CODE = """
import json, sys
before = set(sys.modules)  # what this machine's Python imports by itself
import steersman.cli.main, steersman.cli.commands.run
import steersman.run.assemble, steersman.run.instance, steersman.modes.{mode}.mode
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.parametrize("mode", MODES)
def test_only_what_the_mode_uses_is_imported(mode: str) -> None:
    code = [sys.executable, "-c", CODE.format(mode=mode)]
    modules = json.loads(subprocess.run(code, capture_output=True, text=True, check=True).stdout)
    others = tuple(f"steersman.modes.{other}.mode" for other in MODES if other != mode)
    rare = (name for name, needing in RARELY_USED.items() if mode not in needing)
    unused = (*UNUSED, *others, *rare)
    assert [m for m in modules if any(m == u or m.startswith(f"{u}.") for u in unused)] == []
    assert f"steersman.modes.{mode}.mode" in modules
