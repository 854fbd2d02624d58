from pathlib import Path

import pytest
from msgspec.structs import replace

from steersman.config import (
    ConfigError,
    Flag,
    Group,
    Invalid,
    Parsed,
    UsageError,
    parse_command_line,
    read_file,
    reload_file,
)
from steersman.config.types import VModule

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def parsed(*argv: str, file: str = "") -> Parsed:
    return parse_command_line(argv, read=lambda _: (HEAD + file).encode())


def test_nothing_said() -> None:
    got = parsed()
    assert (got.config.mode, got.config.detect_local_mode) == ("iptables", "ClusterCIDR")
    assert got == Parsed(got.config)


@pytest.mark.parametrize(
    ("argv", "periods"),
    [
        (["--proxy-mode=iptables"], ("36s", "3s")),
        (["--proxy-mode=nftables"], ("36s", "3s")),
        (["--proxy-mode=ipvs"], ("16s", "7s")),
        ([], ("36s", "3s")),
    ],
)
def test_periods_go_by_the_mode(argv: list[str], periods: tuple[str, str]) -> None:
    config = parsed(
        *argv,
        "--iptables-sync-period=36s",
        "--iptables-min-sync-period=3s",
        "--ipvs-sync-period=16s",
        "--ipvs-min-sync-period=7s",
    ).config
    assert (str(config.sync_period), str(config.min_sync_interval)) == periods


def test_cheap_modes_do_not_wait() -> None:
    assert str(parsed("--proxy-mode=nftables").config.min_sync_interval) == "10ms"
    assert str(parsed("--proxy-mode=ebpf", "--min-sync-period=2s").config.min_sync_interval) == "2s"
    assert str(parsed("--proxy-mode=iptables").config.min_sync_interval) == "1s"


def test_fields_are_set() -> None:
    config = parsed(
        "--cluster-cidr=10.0.0.0/8,fd00::/8",
        "--conntrack-min=7",
        "--masquerade-all",
        "--nodeport-addresses=primary",
        "--feature-gates=AllAlpha=true",
        "--udp-timeout=1s",
    ).config
    assert config.cluster_cidrs == ("10.0.0.0/8", "fd00::/8")
    assert config.conntrack.min == 7
    assert config.masquerade_all
    assert config.node_port_addresses == ("primary",)
    assert config.feature_gates == {"AllAlpha": True}
    assert str(config.steersman.udp_idle_timeout) == "1s"


def test_empty_addresses() -> None:
    config = parsed("--bind-address=", "--cluster-cidr=", "--healthz-bind-address=").config
    assert config.bind_address == "0.0.0.0"
    assert config.cluster_cidrs == ()
    assert config.healthz_bind_address == ""


@pytest.mark.parametrize(
    ("argv", "addresses"),
    [
        (["--healthz-port=0"], ("", "127.0.0.1:10249")),
        (["--metrics-port=0"], ("0.0.0.0:10256", "")),
        (["--healthz-port=99"], ("0.0.0.0:10256", "127.0.0.1:10249")),
        (["--healthz-port=99", "--healthz-bind-address=::"], ("[::]:99", "127.0.0.1:10249")),
        (["--metrics-bind-address=1.2.3.4"], ("0.0.0.0:10256", "1.2.3.4:10249")),
        (["--healthz-port=0", "--write-config-to=x"], ("0.0.0.0:10256", "127.0.0.1:10249")),
    ],
)
def test_server_ports(argv: list[str], addresses: tuple[str, str]) -> None:
    config = parsed(*argv).config
    assert (config.healthz_bind_address, config.metrics_bind_address) == addresses


def test_with_a_file_most_flags_are_ignored() -> None:
    got = parsed("--config=f", "--proxy-mode=ipvs", "--cluster-cidr=x", file="mode: nftables\n")
    assert got.config.mode == "nftables"
    assert got.config.cluster_cidrs == ()
    assert got.config_file == "f"
    assert got.warnings == ("ignored because --config is given: --cluster-cidr, --proxy-mode",)


def test_some_flags_beat_the_file() -> None:
    got = parsed(
        "--config=f",
        "--hostname-override= N1 ",
        "--v=5",
        "--vmodule=a=1",
        "--master=https://x",
        "--split-threshold=9",
        "--cleanup",
        "--init-only",
        "--write-config-to=out",
        file="hostnameOverride: other\nlogging: {verbosity: 1, format: text, "
        "vmodule: [{filePattern: b, verbosity: 2}]}\n",
    )
    config = got.config
    assert config.hostname_override == "n1"
    assert config.logging.verbosity == 5
    assert config.logging.vmodule == (
        VModule(file_pattern="a", verbosity=1),
        VModule(file_pattern="b", verbosity=2),
    )
    assert config.steersman.api_servers == ("https://x",)
    assert config.steersman.split_threshold == 9
    assert (got.cleanup, got.init_only, got.write_config_to) == (True, True, "out")
    assert got.warnings == ()


def test_the_file_holds_where_no_flag_beats_it() -> None:
    body = (
        "hostnameOverride: n2\nsteersman: {apiServers: [https://y]}\n"
        "logging: {vmodule: [{filePattern: b, verbosity: 2}]}\n"
    )
    config = parsed("--config=f", file=body).config
    assert config.hostname_override == "n2"
    assert config.steersman.api_servers == ("https://y",)
    assert config.logging.vmodule == (VModule(file_pattern="b", verbosity=2),)


def test_a_hostname_of_spaces_is_refused() -> None:
    with pytest.raises(UsageError, match="empty hostname-override is invalid"):
        parsed("--hostname-override=  ")


def test_what_older_guides_print() -> None:
    got = parsed(
        "--feature-gates=ExperimentalCriticalPodAnnotation=true",
        "--cleanup-iptables",
        "--logtostderr=true",
        "--healthz-port=10256",
    )
    assert got.cleanup
    assert got.warnings == (
        "flag --cleanup-iptables is deprecated: use --cleanup instead",
        "flag --logtostderr is deprecated: it has no effect; remove it",
        "flag --healthz-port is deprecated: use --healthz-bind-address instead",
        "feature gate ExperimentalCriticalPodAnnotation has no effect here",
    )


def test_the_files_own_warnings_name_it() -> None:
    got = parsed("--config=f", file="mood: 1\n")
    assert got.warnings == ('f: unknown field "mood" (did you mean mode?)',)


def test_help_and_version_need_nothing_else() -> None:
    assert parsed("--config=f", "--help", file="[").help
    assert parsed("--version", "--config=f", file="[").version == "true"
    assert parsed("--version=raw").version == "raw"
    assert parsed("--version=false").version == ""


def test_words_are_refused_unless_allowed() -> None:
    with pytest.raises(UsageError, match="unexpected argument 'true'"):
        parsed("--cleanup", "true")
    assert parsed("").arguments == ("",)
    assert parse_command_line(["a"], allow_arguments=True).arguments == ("a",)


def test_further_flags() -> None:
    flag = Flag("output", "string", "", Group.GENERAL, "How to print.")
    got = parse_command_line(["--output=json", "--dry-run"], extra=[flag])
    assert got.values["output"] == "json"
    assert got.dry_run


def test_broken_rules_are_all_told() -> None:
    with pytest.raises(Invalid) as caught:
        parsed("--proxy-mode=x", "--oom-score-adj=9999")
    assert [error.path.rpartition(".")[2] for error in caught.value.errors] == [
        "OOMScoreAdj",
        "ProxyMode",
    ]


def test_a_file_that_is_not_there(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"^--config .*none: No such file or directory$"):
        parse_command_line([f"--config={tmp_path}/none"])
    with pytest.raises(ConfigError, match="null byte"):
        read_file("\0")


def test_a_bad_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--config f: failed to decode: mode: "):
        parsed("--config=f", file="mode: 5\n")


def test_reading_the_file_again(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(HEAD + "mode: ipvs\n")
    old = parse_command_line([f"--config={file}", "--v=3", "--hostname-override=n"])
    file.write_text(HEAD + "mode: ipvs\nbindAddress: '::'\n")
    assert reload_file(old).config == replace(
        old.config,
        bind_address="::",
        healthz_bind_address="[::]:10256",
        metrics_bind_address="[::1]:10249",
    )
    file.write_text(HEAD + "mode: x\n")
    with pytest.raises(Invalid):
        reload_file(old)
