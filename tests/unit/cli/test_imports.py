"""The process imports nothing that the running mode does not use: a module takes 50 to 500 kB."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

UNUSED = (
    "cProfile",
    "jinja2",
    "opentelemetry",
    "steersman.operate",
    "steersman.ui",
    "unittest",
    "zoneinfo",
)
"""Packages and modules that no mode needs."""
MODES = ("ebpf", "iptables", "ipvs", "nftables", "userspace")
CODE = """
import json, os, ssl, sys
from steersman.cli.commands import run
run.import_aiohttp()
import steersman.run.assemble, steersman.run.instance, steersman.modes.{mode}.mode
import aiohttp.connector
contexts = [x for x in vars(aiohttp.connector).values() if isinstance(x, ssl.SSLContext)]
certificates = [context.cert_store_stats()["x509"] for context in contexts]
print(json.dumps([sorted(sys.modules), os.environ.get("SSL_CERT_FILE"), certificates]))
"""


@pytest.mark.parametrize("mode", MODES)
def test_only_what_the_mode_uses_is_imported(mode: str) -> None:
    code = [sys.executable, "-c", CODE.format(mode=mode)]
    environment = {**os.environ, "SSL_CERT_FILE": "/etc/its-own.pem"}
    done = subprocess.run(code, capture_output=True, text=True, check=True, env=environment)
    modules, file, certificates = json.loads(done.stdout)
    others = tuple(f"steersman.modes.{other}" for other in MODES if other != mode)
    unused = (*UNUSED, *others)
    assert [m for m in modules if any(m == u or m.startswith(f"{u}.") for u in unused)] == []
    assert f"steersman.modes.{mode}.mode" in modules
    assert file == "/etc/its-own.pem"
    assert certificates, "aiohttp makes no context any more: import_aiohttp can go"
    assert set(certificates) == {0}
