import json

import pytest
from msgspec.structs import replace

from steersman.config import (
    ProxyConfig,
    configz,
    default_config,
    in_mode,
    load,
    parse_command_line,
    to_node_config,
    to_yaml,
)
from steersman.config.defaults import apply_defaults, apply_platform_defaults
from steersman.config.go import Duration
from steersman.config.types import (
    IPVS,
    DetectLocal,
    IPTables,
    NFTables,
    Steersman,
)
from steersman.model.inputs import DetectLocalMode, NodeConfig
from tests.support.data import RECORDED

GOLDEN = RECORDED / "golden"
HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
PERIODS = """
iptables: {syncPeriod: 11s, minSyncPeriod: 1s, masqueradeAll: true, masqueradeBit: 1}
ipvs: {syncPeriod: 12s, minSyncPeriod: 2s}
nftables: {syncPeriod: 13s, minSyncPeriod: 3s, masqueradeBit: 3}
"""


@pytest.mark.parametrize(
    ("mode", "periods", "masquerade_all", "bit"),
    [
        ("", ("11s", "1s"), True, 1),
        ("iptables", ("11s", "1s"), True, 1),
        ("ipvs", ("12s", "2s"), True, 1),
        ("nftables", ("13s", "3s"), False, 3),
        ("ebpf", ("11s", "1s"), True, 1),
    ],
)
def test_the_mode_says_which_section_counts(
    mode: str, periods: tuple[str, str], masquerade_all: bool, bit: int
) -> None:
    config = load(f"{HEAD}mode: '{mode}'\n{PERIODS}").config
    assert (str(config.sync_period), str(config.min_sync_period)) == periods
    assert str(config.min_sync_interval) == periods[1]
    assert config.masquerade_all is masquerade_all
    assert to_node_config(config).masquerade_bit == bit


@pytest.mark.parametrize(
    ("mode", "sections"),
    [
        ("iptables", ("11s", "0s", "0s", True, False)),
        ("ipvs", ("0s", "11s", "0s", True, False)),
        ("nftables", ("0s", "0s", "11s", False, True)),
    ],
)
def test_in_another_mode_its_section_counts(
    mode: str, sections: tuple[str, str, str, bool, bool]
) -> None:
    config = load(HEAD + PERIODS).config
    document = in_mode(config, mode)
    assert (str(document.sync_period), document.masquerade_all) == ("11s", True)
    assert sections == (
        str(document.iptables.sync_period),
        str(document.ipvs.sync_period),
        str(document.nftables.sync_period),
        document.iptables.masquerade_all,
        document.nftables.masquerade_all,
    )


@pytest.mark.parametrize(
    ("body", "interval"),
    [
        ("mode: nftables", "10ms"),
        ("mode: ebpf", "10ms"),
        ("mode: nftables\nnftables: {minSyncPeriod: 1s}", "1s"),
        ("mode: ebpf\niptables: {minSyncPeriod: 2s}", "2s"),
        ("mode: nftables\nsteersman: {minSyncPeriod: 0s}", "0s"),
        ("mode: iptables\nsteersman: {minSyncPeriod: 5ms}", "5ms"),
        ("mode: iptables", "1s"),
        ("mode: ipvs", "0s"),
    ],
)
def test_cheap_modes_do_not_wait_unless_asked_to(body: str, interval: str) -> None:
    assert str(load(f"{HEAD}{body}\n").config.min_sync_interval) == interval


def test_ipv6_bind_addresses_move_the_servers() -> None:
    config = apply_defaults(ProxyConfig(bind_address="::"))
    assert config.healthz_bind_address == "[::]:10256"
    assert config.metrics_bind_address == "[::1]:10249"


def test_zero_is_kept_where_upstream_has_a_pointer() -> None:
    document = load(
        HEAD + "oomScoreAdj: 0\nconntrack: {min: 0, tcpEstablishedTimeout: 0s}\n"
        "iptables: {masqueradeBit: 0, localhostNodePorts: false}\n"
    )
    config = document.config
    assert (config.oom_score_adj, config.conntrack.min) == (0, 0)
    assert config.conntrack.tcp_established_timeout == 0
    assert (config.iptables.masquerade_bit, config.iptables.localhost_node_ports) == (0, False)


def test_platform_defaults() -> None:
    plain = apply_platform_defaults(ProxyConfig())
    assert (plain.mode, plain.detect_local_mode) == ("iptables", "ClusterCIDR")
    assert plain.node_port_addresses == ()
    nftables = apply_platform_defaults(ProxyConfig(mode="nftables"))
    assert nftables.node_port_addresses == ("primary",)
    given = ProxyConfig(mode="nftables", node_port_addresses=("::/0",))
    assert apply_platform_defaults(given).node_port_addresses == ("::/0",)


def test_the_plan_gets_its_part() -> None:
    config = replace(
        default_config(),
        mode="nftables",
        hostname_override="n1",
        bind_address="010.1.2.3",
        detect_local_mode="InterfaceNamePrefix",
        detect_local=DetectLocal(bridge_interface="br0", interface_name_prefix="veth"),
        cluster_cidr="10.244.1.1/16,junk",
        node_port_addresses=("192.168.0.1/16", "primary"),
        iptables=IPTables(localhost_node_ports=False),
        nftables=NFTables(),
        feature_gates={"AllowServiceExternalIPs": False},
    )
    assert to_node_config(config, node_name="other") == NodeConfig(
        node_name="n1",
        bind_address="10.1.2.3",
        detect_local_mode=DetectLocalMode.INTERFACE_NAME_PREFIX,
        cluster_cidrs=("10.244.0.0/16",),
        bridge_interface="br0",
        interface_name_prefix="veth",
        node_port_addresses=("192.168.0.0/16", "primary"),
        localhost_node_ports=False,
        allow_service_external_ips=False,
    )
    assert to_node_config(default_config(), node_name="host").node_name == "host"


@pytest.mark.parametrize(("given", "name"), [(" Node-A\n", "node-a"), (" ", ""), ("", "host")])
def test_the_name_of_the_node_is_trimmed_and_in_lower_case(given: str, name: str) -> None:
    config = replace(default_config(), hostname_override=given)
    assert to_node_config(config, node_name="host").node_name == name


@pytest.mark.parametrize(("mode", "falls_back"), [("ipvs", True), ("iptables", False)])
def test_only_the_ipvs_mode_falls_back(mode: str, falls_back: bool) -> None:
    asked = Steersman(ipvs_local_fallback=True)
    config = replace(default_config(), mode=mode, steersman=asked)
    assert to_node_config(config, node_name="n").local_falls_back is falls_back


def test_written_and_read_again_it_is_the_same() -> None:
    document = ProxyConfig(
        mode="ipvs",
        feature_gates={"AllAlpha": True},
        hostname_override="0x1F",
        port_range="1e3",
        cluster_cidr="10.0.0.0/8,fd00::/8",
        show_hidden_metrics_for_version="1.35",
        ipvs=IPVS(sync_period=Duration(5), exclude_cidrs=("a", "2026-01-01", "1:30", "")),
        iptables=IPTables(),
        nftables=NFTables(masquerade_bit=3),
        windows_run_as_service=True,
    )
    config = apply_platform_defaults(in_mode(apply_defaults(document), "ipvs"))
    text = to_yaml(config)
    assert load(text).config == config
    assert 'hostnameOverride: "0x1F"' in text


def test_write_config_to_equals_upstreams() -> None:
    golden = GOLDEN / "write-config-to.yaml"
    parsed = parse_command_line(["--write-config-to=x.yaml"])
    assert to_yaml(parsed.config) == golden.read_text()


def test_configz_equals_upstreams() -> None:
    golden = GOLDEN / "iptables/http-10249-configz.txt"
    body = golden.read_text().partition("\n\n")[2]
    # what that process was started with, per its own answer
    document = next(iter(json.loads(body).values()))
    argv = ["--config=f", "--hostname-override=peer-node", "--v=2"]
    parsed = parse_command_line(argv, read=lambda _: json.dumps(document).encode())
    assert configz(parsed.config).decode() == body
