"""The process imports nothing that the running mode does not use: a module takes 50 to 500 kB."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from scripts import image_lock

UNUSED = (
    "aiohttp",
    "bz2",
    "cProfile",
    "difflib",
    "email",
    "h2",
    "hpack",
    "http.client",
    "hyperframe",
    "jinja2",
    "lzma",
    "opentelemetry",
    "pkgutil",
    "prometheus_client",
    "shutil",
    "steersman.operate",
    "steersman.run.observe.change_trace",
    "steersman.source.files",
    "steersman.ui",
    "tempfile",
    "typing_extensions",
    "unittest",
    "urllib.request",
    "zoneinfo",
)
"""Packages and modules that no mode needs."""
RARELY_USED = {
    "steersman.modes.netfilter_tracer": ("ipvs",),
    "steersman.modes.userspace.direct_portals": (),
    "steersman.netfilter.iptables.saved": ("iptables", "ipvs", "userspace"),
    "steersman.proxy.engine": ("userspace",),
}
"""Modules that only these modes need before somebody asks for something."""
IF_THERE = {"_distutils_hack", "typing_extensions"}
"""Modules of other packages that Python's and msgspec's start import if they find them."""
MODES = ("ebpf", "iptables", "ipvs", "nftables", "userspace")
CODE = """
import json, sys
before = set(sys.modules)  # what this machine's Python imports by itself
import steersman.cli.main
steersman.cli.main.import_msgspec()
import steersman.cli.commands.run
import steersman.run.process.assemble, steersman.run.process.instance, steersman.modes.{mode}.mode
from steersman.config import parse_command_line
from steersman.source.kubeconfig import load_cluster_access
given = parse_command_line(["--config={folder}/config.yaml"]).config
access = load_cluster_access(given.client_connection.kubeconfig)
assert access.servers == ("https://10.9.0.1",)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
WITHOUT_YAML = """
import json, sys
from steersman.config import load, parse_command_line
import steersman.source.kubeconfig
parse_command_line(["--proxy-mode=nftables", "--v=2"])
load('{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}')
print("yaml" in sys.modules)
"""
WHOLE = """
import importlib, pkgutil, sys
import steersman
for each in pkgutil.walk_packages(steersman.__path__, "steersman."):
    if not each.name.endswith("__main__") and "opentelemetry" not in each.name:
        importlib.import_module(each.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
CONFIG = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {{kubeconfig: {folder}/kubeconfig}}
"""
KUBECONFIG = """current-context: x
contexts: [{name: x, context: {cluster: c}}]
clusters: [{name: c, cluster: {server: https://10.9.0.1}}]
"""


@pytest.mark.parametrize("mode", MODES)
def test_only_what_the_mode_uses_is_imported(mode: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    code = [sys.executable, "-c", CODE.format(mode=mode, folder=tmp_path)]
    modules = json.loads(subprocess.run(code, capture_output=True, text=True, check=True).stdout)
    others = tuple(f"steersman.modes.{other}.mode" for other in MODES if other != mode)
    rare = (name for name, needing in RARELY_USED.items() if mode not in needing)
    unused = (*UNUSED, *others, *rare)
    assert [m for m in modules if any(m == u or m.startswith(f"{u}.") for u in unused)] == []
    assert f"steersman.modes.{mode}.mode" in modules


def test_yaml_is_imported_only_for_files_in_yaml() -> None:
    code = [sys.executable, "-c", WITHOUT_YAML]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_whole_program_needs_nothing_but_its_dependencies() -> None:
    code = [sys.executable, "-c", WHOLE]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    shipped = {*image_lock.runtime(), "steersman"}
    assert {"h11", "h2", "jinja2", "msgspec", "steersman", "yaml"} <= imported
    others = {
        module
        for module, packages in packages_distributions().items()
        if not shipped & {str(canonicalize_name(package)) for package in packages}
    }
    assert imported & others <= IF_THERE
