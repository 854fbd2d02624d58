"""A model of iptables' tables: carries out restore input, refuses what the kernel refuses."""

from __future__ import annotations

from steersman.netfilter.iptables.names import BUILT_IN

_BUILT_IN = {
    "mangle": sorted(BUILT_IN),
    "filter": ["INPUT", "FORWARD", "OUTPUT"],
    "nat": ["PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"],
}
_TARGETS = frozenset({"ACCEPT", "DROP", "RETURN", "REJECT", "MARK", "MASQUERADE", "DNAT"})


class RefusedError(Exception):
    """A line that the kernel would refuse."""


class Tables:
    """Chains and rules by family and table."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, str], dict[str, list[str]]] = {
            (family, table): {chain: [] for chain in chains}
            for family in (4, 6)
            for table, chains in _BUILT_IN.items()
        }

    def save(self, family: int) -> str:
        """Print as iptables-save does."""
        lines: list[str] = []
        for (own, table), chains in self._tables.items():
            if own == family:
                lines.append(f"*{table}")
                lines += [f":{chain} - [0:0]" for chain in sorted(chains)]
                lines += [f"-A {chain} {r}" for chain in sorted(chains) for r in chains[chain]]
                lines.append("COMMIT")
        return "\n".join(lines)

    def restore(self, family: int, text: str) -> None:
        """Carry out restore input, table by table."""
        table = ""
        for line in text.rstrip("\n").split("\n"):
            if line.startswith("*"):
                table = line[1:]
            elif line == "COMMIT":
                self._check(self._tables[family, table])
            else:
                self._line(self._tables[family, table], line)

    def _line(self, chains: dict[str, list[str]], line: str) -> None:
        if line.startswith(":"):
            chains[line[1:].split(maxsplit=1)[0]] = []
            return
        verb, chain, *rest = line.split(" ", 2)
        rule = rest[0] if rest else ""
        if verb == "-N":
            if chain in chains:
                raise RefusedError(line)
            chains[chain] = []
        elif chain not in chains or (verb == "-D" and rule not in chains[chain]):
            raise RefusedError(line)
        elif verb == "-X":
            if chains.pop(chain):
                raise RefusedError(line)
        else:
            _change(chains[chain], verb, rule)

    @staticmethod
    def _check(chains: dict[str, list[str]]) -> None:
        for rules in chains.values():
            for rule in rules:
                target = rule.partition("-j ")[2].split(" ")[0]
                if target and target not in _TARGETS and target not in chains:
                    raise RefusedError(f"{rule} leads to nothing")


def _change(rules: list[str], verb: str, rule: str) -> None:
    if verb == "-A":
        rules.append(rule)
    elif verb == "-I":
        rules.insert(0, rule)
    else:
        rules.remove(rule)
