from __future__ import annotations

from steersman.model.ruleset import Diff, diff
from steersman.modes.iptables.render import Features, render_service
from steersman.modes.iptables.render_node import render_node
from steersman.modes.iptables.script import write_runs
from steersman.netfilter.iptables.names import RuleKey
from steersman.netfilter.iptables.restore import LIMITS, Limits, Run
from tests.support.builders.plans import SETTINGS, simple

NODE = render_node(SETTINGS, Features())
ALL = LIMITS["legacy"]


def service(number: int) -> dict[RuleKey, str]:
    return render_service(simple(number), SETTINGS, Features())


def lines(change: Diff, *, limits: Limits = ALL) -> list[list[str]]:
    return [run.text.strip().split("\n") for run in write_runs(change, limits, {})]


def test_nothing_to_do_is_no_run() -> None:
    assert not list(write_runs(Diff(), ALL, {}))


def test_a_first_start_is_one_run_per_family() -> None:
    runs = list(write_runs(diff({}, NODE), ALL, {}))
    assert [run.family for run in runs] == [4, 6]
    text = runs[0].text
    assert [line for line in text.split("\n") if line.startswith("*")] == [
        "*mangle",
        "*filter",
        "*nat",
    ]
    assert text.count("COMMIT\n") == 3
    assert "-N KUBE-FIREWALL\n" in text
    assert ":KUBE-FIREWALL" not in text


def test_jumps_end_up_in_their_order_with_kubelets_on_top() -> None:
    (text, _) = (run.text for run in write_runs(diff({}, NODE), ALL, {}))
    inserted = [line[9:] for line in text.split("\n") if line.startswith("-I INPUT ")]
    wanted = NODE[4, "filter", "INPUT", "jumps"].split("\n")
    assert inserted == [*(line[9:] for line in reversed(wanted)), "-j KUBE-FIREWALL"]


def test_an_endpoint_change_writes_only_its_chains() -> None:
    old = service(1)
    new = render_service(simple(1, count=4), SETTINGS, Features())
    (run,) = lines(diff(old, new))
    assert run[0] == "*nat"
    assert len([line for line in run if line.startswith(":")]) == 2  # KUBE-SVC and one KUBE-SEP
    assert not any(line.startswith(("-I", "-D", "-X")) for line in run)


def test_chains_are_declared_and_filled_in_descending_order() -> None:
    """iptables-legacy inserts a name that sorts before all others at once."""
    (run,) = lines(diff({}, {**service(1), **service(2), **service(3)}))
    declared = [line[1:].partition(" ")[0] for line in run if line.startswith(":")]
    filled = [line.split(" ")[1] for line in run if line.startswith("-A ")]
    assert len(declared) == len(set(declared)) > 6
    assert declared == sorted(declared, reverse=True) == list(dict.fromkeys(filled))


def test_a_service_added_and_removed() -> None:
    (added,) = lines(diff({}, service(1)))
    assert [line for line in added if line.startswith("-I")] == [
        "-I" + service(1)[4, "nat", "KUBE-SERVICES", "ns-1/svc-1:http tcp"][2:]
    ]
    (removed,) = lines(diff(service(1), {}))
    assert sum(line.startswith("-D KUBE-SERVICES ") for line in removed) == 1
    assert sum(line.startswith(":") for line in removed) == 4
    assert all(line.startswith("-X ") for line in removed[-5:-1])
    assert removed[-1] == "COMMIT"


def test_a_changed_group_is_replaced_in_its_order() -> None:
    key = (4, "nat", "KUBE-SERVICES", "ns/a tcp")
    change = Diff(
        changed={
            key: (
                "-A KUBE-SERVICES a\n-A KUBE-SERVICES b",
                "-A KUBE-SERVICES c\n-A KUBE-SERVICES d",
            )
        }
    )
    assert lines(change) == [
        [
            "*nat",
            "-D KUBE-SERVICES a",
            "-D KUBE-SERVICES b",
            "-I KUBE-SERVICES d",
            "-I KUBE-SERVICES c",
            "COMMIT",
        ]
    ]


def test_rules_are_deleted_as_this_machine_spells_them() -> None:
    key = (4, "nat", "KUBE-SERVICES", "ns/a tcp")
    (run,) = write_runs(
        Diff(removed={key: "-A KUBE-SERVICES a"}),
        ALL,
        {"-A KUBE-SERVICES a": "-A KUBE-SERVICES other"},
    )
    assert run == Run(4, "*nat\n-D KUBE-SERVICES other\nCOMMIT\n")


def test_the_tail_is_put_last_and_its_mark_is_no_rule() -> None:
    key = (4, "nat", "KUBE-SERVICES", "node ports")
    change = Diff(changed={key: ("-A KUBE-SERVICES t\n# other rules follow", "-A KUBE-SERVICES t")})
    assert lines(change) == [["*nat", "-D KUBE-SERVICES t", "-A KUBE-SERVICES t", "COMMIT"]]


def test_what_is_shared_with_kubelet_is_never_removed() -> None:
    kubelets = {
        key: value
        for key, value in NODE.items()
        if key[3] == "kubelet" or key[2] == "KUBE-FIREWALL"
    }
    assert len(kubelets) == 7
    assert not lines(diff(kubelets, {}))


def test_cleanup_removes_chains_without_deleting_their_rules_one_by_one() -> None:
    have = {key: value for key, value in {**NODE, **service(1)}.items() if key[0] == 4}
    (run,) = lines(diff(have, {}))
    assert not [line for line in run if line.startswith("-D KUBE-")]
    assert sum(line.startswith("-D ") for line in run) == 12
    assert sum(line.startswith("-X ") for line in run) == 16


def test_chains_that_foreign_rules_lead_to_are_emptied_but_stay() -> None:
    key = (4, "nat", "KUBE-MARK-MASQ", "")
    held = frozenset({key[:3]})
    (run,) = write_runs(Diff(removed={key: "-A KUBE-MARK-MASQ -j MARK"}), ALL, {}, held)
    assert run.text == "*nat\n:KUBE-MARK-MASQ - [0:0]\nCOMMIT\n"


def test_a_large_diff_is_cut() -> None:
    want = {**NODE, **{k: v for n in range(50) for k, v in service(n).items()}}
    want = {key: value for key, value in want.items() if key[0] == 4}
    runs = lines(diff({}, want), limits=Limits(whole=100, run=40))
    assert len(runs) > 6
    known = {"ACCEPT", "DROP", "RETURN", "MARK", "MASQUERADE", "DNAT", "KUBE-FIREWALL"}
    for run in runs:  # every rule leads to something complete
        known |= {line[1:].split()[0] for line in run if line.startswith(":")}
        targets = {line.partition(" -j ")[2].split()[0] for line in run if " -j " in line}
        assert targets <= known
    built_in = [
        i
        for i, run in enumerate(runs)
        for line in run
        if line.startswith(("-I INPUT", "-I PREROUTING"))
    ]
    dispatch = [
        i for i, run in enumerate(runs) for line in run if line.startswith("-I KUBE-SERVICES")
    ]
    assert min(built_in) > max(dispatch)


def test_a_large_cleanup_is_cut() -> None:
    have = {**NODE, **{k: v for n in range(50) for k, v in service(n).items()}}
    have = dict(sorted((key, value) for key, value in have.items() if key[0] == 4))
    runs = lines(diff(have, {}), limits=Limits(whole=100, run=40))
    removed = [line[3:] for run in runs for line in run if line.startswith("-X ")]
    assert len(removed) == 212
    services = [i for i, name in enumerate(removed) if name.startswith("KUBE-SVC-")]
    endpoints = [i for i, name in enumerate(removed) if name.startswith("KUBE-SEP-")]
    assert max(services) < min(endpoints)
    emptied = next(i for i, run in enumerate(runs) if ":KUBE-SERVICES - [0:0]" in run)
    assert emptied < next(
        i for i, run in enumerate(runs) if any(line.startswith("-X") for line in run)
    )
