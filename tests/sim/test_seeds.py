"""Short lives of nodes in every seed, and that a seed is all that decides about a life."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

SEEDS, SHARE = 100, 20
HOURS = 0.25


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the simulation in a process of its own: it replaces the clocks."""
    argv = [sys.executable, "-m", "tests.sim", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("first", range(0, SEEDS, SHARE))
def test_nodes_survive_their_lives(first: int) -> None:
    done = simulate(f"--first={first}", f"--seeds={SHARE}", f"--hours={HOURS}", "-j=1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("mutation", "found"),
    [
        ("lose_failed_writes", "not as after a fresh start|livez answers .* not 503"),
        ("believe_a_missing_node", "the node: |not as after a fresh start: .*'node ports'"),
        ("count_link_local_addresses", "noise costs"),
        ("mix_families", "the connection of a client that nothing concerned was cut"),
        ("show_every_service", "the default page of metrics has series by Service"),
    ],
)
def test_an_old_defect_is_found_again(mutation: str, found: str) -> None:
    _is_found("--hours=1", f"--mutation={mutation}", found=found)


@pytest.mark.parametrize(
    ("mutation", "troubles", "found"),
    [
        ("lose_changes_after_a_check", "live_switch", "not as after a fresh start"),
        (
            "forget_lost_probes",
            "probes_are_interrupted,reloaded",
            "is still ejected|is dead and not ejected",
        ),
        (
            "believe_every_probe",
            "attacked",
            "canary/.* (becomes|is taken away)|only the node's probes are denied|"
            "this node reaches no endpoint",
        ),
        (
            "eject_without_probes",
            "attacked",
            "canary/.* (becomes|is taken away)|is ejected .*, and it answers|"
            "only the node's probes are denied|this node reaches no endpoint",
        ),
        ("never_return", "endpoints_fail", "is still ejected"),
        (
            "eject_all",
            "attacked",
            "no endpoints left, as all are ejected|only the node's probes are denied",
        ),
        ("accept_without_a_turn", "burst", "a step held the loop"),
    ],
)
def test_an_old_defect_is_found_in_such_troubles(mutation: str, troubles: str, found: str) -> None:
    _is_found("--hours=2", f"--mutation={mutation}", f"--troubles={troubles}", found=found)


def _is_found(*words: str, found: str) -> None:
    done = simulate("--seeds=60", "-j=1", "--stop", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    (failure,) = (line for line in done.stdout.splitlines() if " FAILED after " in line)
    assert re.search(found, failure)


def test_a_seed_replays_exactly() -> None:
    first, second = (simulate("--seed=7", "--hours=1").stdout for _ in range(2))
    assert re.findall(r"^seed 7: (\S+),", first, re.MULTILINE)
    assert re.sub(r"in .* s of CPU .*", "", first) == re.sub(r"in .* s of CPU .*", "", second)
