"""The results of checks: a verdict with evidence and a remedy, and what they are the cause of.

Several errors often have one cause. So each result has a Cause, from the cluster's objects down to
the packets: an error is explained by the errors above it, and the uppermost is the likely cause.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

UNSEEN = "pods (their namespaces are not visible: hostPID)"
"""What is not tried in a pod that sees only its own processes; most ways begin there."""


class Verdict(enum.StrEnum):
    """The result of a check, the worst first."""

    ERROR = "error"  # traffic fails because of it
    WARNING = "warning"  # some traffic may fail, or it will
    UNKNOWN = "unknown"  # it could not be checked
    NOTICE = "notice"  # it is odd, and harmless unless a connection fails
    OK = "ok"
    SKIPPED = "skipped"  # it has nothing to do with the question


class Cause(enum.IntEnum):
    """Where a problem is. A problem is explained by those of smaller numbers.

    Numbers are ten apart: a result may use one in between, such as `Cause.NODE + 1`.
    """

    OBJECT = 10  # the Service is missing or malformed
    ENDPOINTS = 20  # its endpoints: selector, readiness, names of ports
    POLICY = 30  # what the Service asks for: traffic policies, source ranges, affinity, hints
    PROXY = 40  # our process: not running, cut off from the API server, another proxy
    RULES = 50  # the kernel does not have what the plan says
    NODE = 60  # this machine: firewall, sysctls, modules, full tables
    PATH = 70  # between the node and the endpoints: routes, MTU
    ENDPOINT = 80  # the endpoint itself refuses or does not answer
    SYMPTOM = 90  # a connection to the Service fails


class CheckResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One thing that a check has found; a check may find several."""

    verdict: Verdict
    text: str
    """A sentence without a full stop that states the fact."""
    evidence: tuple[str, ...] = ()
    """Lines that prove it, as a tool or the kernel prints them."""
    remedy: str = ""
    """What to do."""
    cause: int = 0
    """A Cause, or a number in between; 0 for that of the check."""
    suspect: bool = False
    """For a warning or notice: it may well be the reason why connections fail. If some do and no
    error explains it, this is the likely cause. For an error: such a suspect may explain it."""
    untried: tuple[str, ...] = ()
    """What was not tried although it belongs to the question, in a few words each."""
    unfinished: bool = False
    """The check could not be carried out, so the whole question has no answer."""
    check: str = ""
    """Name of the check that it is of, once that has ended."""
    title: str = ""
    code: str = ""
    """That of the Finding that it is about, else that of the check (model/codes.py); "" from a node
    without codes."""


def result_of(
    verdict: Verdict,
    text: str,
    *evidence: str,
    remedy: str = "",
    cause: int = 0,
    suspect: bool = False,
    unfinished: bool = False,
    code: str = "",
) -> CheckResult:
    """Return a result with lines of evidence; see the fields of CheckResult."""
    return CheckResult(
        verdict=verdict,
        text=text,
        evidence=evidence,
        remedy=remedy,
        cause=cause,
        suspect=suspect,
        unfinished=unfinished,
        code=code,
    )


error = partial(result_of, Verdict.ERROR)
warning = partial(result_of, Verdict.WARNING)
unknown = partial(result_of, Verdict.UNKNOWN)
notice = partial(result_of, Verdict.NOTICE, suspect=True)
"""An oddity: the likely cause if a connection fails and no error explains it."""
ok = partial(result_of, Verdict.OK)
skipped = partial(result_of, Verdict.SKIPPED)


def first_of(names: Sequence[str], most: int) -> str:
    """Return the first of some names in words, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


Found: TypeAlias = CheckResult | Iterable[CheckResult]
"""What a check found: one result or several."""
