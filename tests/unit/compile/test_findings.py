"""Findings: collected, limited and listed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steersman.compile.findings import IN_TOTAL, PER_SERVICE, FindingCollector, FindingIndex
from steersman.model import codes
from steersman.model.findings import Finding, Severity
from steersman.model.kube import ObjectMeta
from steersman.model.names import ObjectName

WEB = ObjectName("shop", "web")
WARNING, ERROR = Severity.WARNING, Severity.ERROR


def finding(field: str, about: str = "Service shop/web", severity: Severity = WARNING) -> Finding:
    return Finding(about, field, "is odd", severity)


def test_the_entries_of_a_list_are_one_finding() -> None:
    problems = FindingCollector("Service", codes.SERVICE_FIELD, ObjectMeta("web", "shop"))
    assert problems.findings == ()
    for index in range(6):
        problems.add(f"spec.externalIPs[{index}]", f"{index} is odd")
    problems.add("spec.ports[0].nodePort", "is odd")
    problems.add("spec.ports[0].nodePort", "is odd")  # said twice
    problems.add("status", "one is odd")
    problems.add("status", "two is odd")
    problems.add("status", "not served", ERROR, codes.REFUSED)
    assert list(map(str, problems.findings)) == [
        "Service shop/web spec.externalIPs[0]: 0 is odd (and 5 more: spec.externalIPs[1], "
        "spec.externalIPs[2], spec.externalIPs[3], ...) [SM1011]",
        "Service shop/web spec.ports[0].nodePort: is odd [SM1011]",
        "Service shop/web status: one is odd (and 1 more) [SM1011]",
        "Service shop/web status: not served [SM1002]",
    ]


def test_the_index_lists_what_it_was_given() -> None:
    index = FindingIndex()
    assert (index.listed, index.unlisted) == ((), {})
    index.put(WEB, [finding("b"), finding("a"), finding("a")])
    index.put(ObjectName("shop", "api"), [finding("c", "Service shop/api")])
    assert [each.field for each in index.listed] == ["c", "a", "b"]
    before = index.listed
    index.put(WEB, [finding("a"), finding("b")])
    assert index.listed is before  # nothing changed, nothing is built again
    index.put(WEB, ())
    assert [each.field for each in index.listed] == ["c"]
    index.put(ObjectName("shop", "api"), ())
    assert (index.listed, index.unlisted) == ((), {})


def test_findings_hold_no_control_characters_and_are_bounded() -> None:
    index = FindingIndex()
    index.put(WEB, [Finding("Service a\nb", "x\x1b" * 10_000, "y\u2028" * 10_000)])
    (found,) = index.listed
    assert str(found).isprintable()
    assert len(str(found)) < 10_000


def test_one_service_lists_errors_first_and_counts_the_rest() -> None:
    index = FindingIndex()
    many = [finding(f"f{n:02}") for n in range(40)]
    index.put(WEB, [*many, finding("zz", severity=ERROR)])
    assert len(index.listed) == PER_SERVICE
    assert index.listed[-2].field == "zz"
    assert index.listed[-1].reason.startswith("26 more Findings about this Service")
    assert index.unlisted == {WARNING: 25}  # and the last one listed
    index.put(WEB, [finding(f"f{n:02}", severity=ERROR) for n in range(40)])
    assert index.listed[-1].severity is ERROR
    assert index.unlisted == {ERROR: 24}


def test_a_namespace_cannot_hide_the_findings_of_another() -> None:
    index = FindingIndex()
    for number in range(2 * IN_TOTAL):
        name = ObjectName("evil", f"s{number}")
        index.put(name, [finding("f", f"Service {name}")])
    index.put(WEB, [finding("g")])
    assert len(index.listed) < IN_TOTAL
    assert finding("g") in index.listed
    assert "more Findings are not listed" in index.listed[-1].reason
    assert sum(index.unlisted.values()) + len(index.listed) == 2 * IN_TOTAL + 1
    for number in range(IN_TOTAL - 1, 2 * IN_TOTAL):
        index.put(ObjectName("evil", f"s{number}"), ())
    assert (len(index.listed), index.unlisted) == (IN_TOTAL, {})


def test_more_namespaces_than_findings_that_are_listed() -> None:
    index = FindingIndex()
    for number in range(IN_TOTAL + 10):
        index.put(ObjectName(f"ns{number}", "web"), [finding("f", f"Service ns{number}/web")])
    assert len(index.listed) == IN_TOTAL
    assert index.unlisted == {WARNING: 10}


COUNTS = st.dictionaries(
    st.builds(ObjectName, st.sampled_from("abc"), st.sampled_from("xyz")), st.integers(0, 40)
)


@given(st.lists(COUNTS, max_size=4))
def test_the_index_counts_all_and_forgets_nothing(rounds: list[dict[ObjectName, int]]) -> None:
    index, counts = FindingIndex(), dict[ObjectName, int]()
    for puts in rounds:
        for name, count in puts.items():
            severities = [ERROR if n % 3 == 0 else WARNING for n in range(count)]
            index.put(
                name, [finding(str(n), f"Service {name}", s) for n, s in enumerate(severities)]
            )
        counts |= puts
        total = len(index.listed) + sum(index.unlisted.values())
        assert total == sum(counts.values())
        fresh = FindingIndex()
        for name in counts:
            fresh.put(
                name,
                [
                    finding(str(n), f"Service {name}", ERROR if n % 3 == 0 else WARNING)
                    for n in range(counts[name])
                ],
            )
        assert (index.listed, index.unlisted) == (fresh.listed, fresh.unlisted)
