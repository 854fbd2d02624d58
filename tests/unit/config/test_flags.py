import re

import pytest

from steersman.config.arguments import READERS, Arguments, parse_arguments, read_value
from steersman.config.commandline import assign
from steersman.config.defaults import default_config
from steersman.config.errors import UsageError
from steersman.config.flags import FLAGS, LOGGING, OWN, UPSTREAM
from steersman.config.flags_upstream import Flag
from steersman.config.go import Duration
from steersman.config.types import VModule
from tests.support.data import RECORDED

GOLDEN = RECORDED / "golden"
ZERO = {"bool": "false", "duration": "0s", "quantity": "0", "Level": "0", "version[=true]": "false"}


def parsed(*argv: str) -> Arguments:
    return parse_arguments(argv, FLAGS)


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parsed(*argv)
    return str(caught.value)


def test_the_table_is_upstreams() -> None:
    golden = GOLDEN / "flags.md"
    rows = re.findall(r"^\| (-\w)? ?\| --(\S+) \| (\S+) \| (.*?) ?\| ", golden.read_text(), re.M)
    expected = {}
    for short, name, kind, default in rows:
        value = default.strip('"') or ZERO.get(kind, "")
        expected[name] = (short.strip("-"), kind.removesuffix("[=true]"), value)
    shown = {name: FLAGS[name] for name in UPSTREAM if not FLAGS[name].deprecated}
    assert {n: (f.short, f.kind, f.default) for n, f in shown.items()} == expected


def test_every_upstream_default_is_the_configurations() -> None:
    config = default_config()
    for flag in FLAGS.values():
        if flag.target and flag.name in UPSTREAM:
            assert assign(config, flag.target, read_value(flag, "", flag.default)) == config, flag


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_a_row_is_complete(flag: Flag) -> None:
    assert flag.kind in READERS
    assert flag.help
    assert re.fullmatch(r"[a-z0-9-]+", flag.name)
    if flag.default:
        read_value(flag, flag.name, flag.default)


def test_ours_do_not_clash() -> None:
    assert not OWN & UPSTREAM
    assert "v" in LOGGING


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--proxy-mode=ipvs"], {"proxy-mode": "ipvs"}),
        (["--proxy-mode", "ipvs"], {"proxy-mode": "ipvs"}),
        (["--proxy_mode=ipvs"], {"proxy-mode": "ipvs"}),
        (["--proxy-mode="], {"proxy-mode": ""}),
        (["--proxy-mode=a", "--proxy-mode=b"], {"proxy-mode": "b"}),
        (["--v=2"], {"v": 2}),
        (["-v=2"], {"v": 2}),
        (["-v", "2"], {"v": 2}),
        (["-v2"], {"v": 2}),
        (["--cleanup"], {"cleanup": True}),
        (["--cleanup=false"], {"cleanup": False}),
        (["--cleanup=T"], {"cleanup": True}),
        (["--oom-score-adj", "-5"], {"oom-score-adj": -5}),
        (["--kube-api-qps=7.5"], {"kube-api-qps": 7.5}),
        (["--iptables-sync-period=1m"], {"iptables-sync-period": Duration.parse("60s")}),
        (["--ipvs-exclude-cidrs=a,b", "--ipvs-exclude-cidrs=c"],
         {"ipvs-exclude-cidrs": ("a", "b", "c")}),
        (["--feature-gates=A=true,B=false", "--feature-gates", "A=0"],
         {"feature-gates": {"A": False, "B": False}}),
        (["--vmodule=a=1", "--vmodule=b=2"],
         {"vmodule": (VModule(file_pattern="a", verbosity=1),
                      VModule(file_pattern="b", verbosity=2))}),
        (["--master=http://a", "--master=http://b,http://c"],
         {"master": ("http://a", "http://b", "http://c")}),
        (["--bind-address=010.0.0.1"], {"bind-address": "010.0.0.1"}),
        (["--healthz-bind-address=1.2.3.4"], {"healthz-bind-address": "1.2.3.4"}),
        (["--healthz-bind-address=[::]:80"], {"healthz-bind-address": "[::]:80"}),
        (["--metrics-bind-address="], {"metrics-bind-address": ""}),
        (["--log-text-info-buffer-size=4k"], {"log-text-info-buffer-size": "4k"}),
        (["--version"], {"version": "true"}),
        (["--version=raw"], {"version": "raw"}),
        (["--version=0"], {"version": "false"}),
        (["--version=v1.2.3"], {"version": "v1.2.3"}),
    ],
)  # fmt: skip
def test_values(argv: list[str], values: dict[str, object]) -> None:
    assert parsed(*argv).values == values


def test_words_that_are_no_flags() -> None:
    got = parsed("a", "--cleanup", "true", "-", "--", "--proxy-mode=x")
    assert got.values == {"cleanup": True}
    assert got.positional == ("a", "true", "-", "--proxy-mode=x")


@pytest.mark.parametrize("word", ["-h", "--help", "--help=true"])
def test_help_ends_the_reading(word: str) -> None:
    assert parsed("--v=1", word, "--nonsense").stopped == "help"


def test_no_help_does_not() -> None:
    assert parsed("--help=false", "--v=1").values == {"help": False, "v": 1}


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--proxy-mod=ipvs"], "unknown flag: --proxy-mod (did you mean --proxy-mode?)"),
        (["--qqqqqqqq"], "unknown flag: --qqqqqqqq; --help lists them all"),
        (["--"[:1] + "x"], "unknown shorthand flag: 'x' in -x; --help lists them all"),
        (["-proxy-mode=ipvs"], "(did you mean --proxy-mode=ipvs?)"),
        (["-proxy-mod=ipvs"], "(did you mean --proxy-mode?)"),
        (["-hv"], "-hv: -h takes no value"),
        (["--v"], "flag needs an argument: --v"),
        (["-v"], "flag needs an argument: -v, --v"),
        (["--v=-1"], "invalid argument \"-1\" for \"--v\" flag: '-1' is not between 0"),
        (["-vx"], "invalid argument \"x\" for \"-v, --v\" flag: 'x' is not a whole number"),
        (["--cleanup="], "invalid argument \"\" for \"--cleanup\" flag: '' is neither"),
        (["--conntrack-min=2147483648"], "is not between -2147483648 and 2147483647"),
        (["--kube-api-qps=fast"], "could not convert string to float"),
        (["--kube-api-qps=inf"], "'inf' is not a finite number"),
        (["--iptables-sync-period=30"], "'30' is not a duration"),
        (["--bind-address=localhost"], "'localhost' is not a valid IP address"),
        (["--healthz-bind-address=x"], "'x' is not in a valid format (ip or ip:port)"),
        (["--healthz-bind-address=x:1"], "'x' is not a valid IP address"),
        (["--healthz-bind-address=::1:x"], "not in a valid format"),
        (["--healthz-bind-address=1.2.3.4:x"], "'x' is not a whole number"),
        (["--feature-gates=A"], "'A' is not KEY=VALUE"),
        (["--feature-gates=A=maybe"], "'maybe' is neither true nor false"),
        (["--vmodule=a"], "'a' is not KEY=VALUE"),
        (["--nodeport-addresses=\"a"], "not a comma-separated list"),
        (["--log-json-info-buffer-size=x"], "'x' is not a quantity"),
        (["--version=1.2"], "neither true nor false"),
    ],
)  # fmt: skip
def test_what_cannot_be_understood(argv: list[str], error: str) -> None:
    assert error in refusal(*argv)
