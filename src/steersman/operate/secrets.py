"""Remove secrets from texts that are given away: tokens, keys, certificates, passwords.

A kubeconfig keeps only the fields that are known to be harmless. Any other text loses what looks
like a secret, whatever it is called: a report may quote a log or the command line of a program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from steersman.model.addresses import without_password

REMOVED = "(removed)"
_WORDS = (
    r"token|password|passwd|passphrase|secret|credentials?|api[-_]?key|private[-_]?key|[-_]data"
)
_NAMES = rf"[\w.-]*(?:{_WORDS})"
_PATTERNS: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (("-----begin ",), re.compile(r"-----BEGIN [\s\S]*?(?:-----END [^-\n]*-----|\Z)"), REMOVED),
    # The same in base64, and JSON web tokens
    (("ls0tls1crudjti",), re.compile(r"LS0tLS1CRUdJTi[\w+/=\\]*"), REMOVED),
    (("eyj",), re.compile(r"\beyJ[\w-]{5,}\.[\w-]+\.[\w-]*"), REMOVED),
    (
        ("bearer", "basic"),
        re.compile(r"(?i)\b(bearer|basic)[ \t]+[\w+/=.~-]{8,}"),
        rf"\1 {REMOVED}",
    ),
)
"""Each with words in lower case, one of which is in every match: to look for these is cheap."""
_NAMED_WORDS = (
    *("token", "passw", "passphrase", "secret", "credential", "-data", "_data"),
    *("apikey", "api-key", "api_key", "privatekey", "private-key", "private_key"),
)
"""One is in every match of `_NAMED`; names of iptables' chains have a `key` now and then."""
_NAMED = re.compile(
    rf"""(?i)(["']?{_NAMES}["']?[ \t]*[:=][ \t]*)("[^"\n]*"|'[^'\n]*'|[^\s"',}}]+)"""
)
"""What is called like a secret, in one line; it takes seconds for the rules of a node."""
_SECRET_FLAG = re.compile(rf"(?i)--?{_NAMES}")
_SAFE_VARIABLES = re.compile(r"KUBERNETES_|STEERSMAN_|NO_PROXY$|no_proxy$|PATH$|LANG$|HOSTNAME$")
_NESTED = frozenset(
    ("clusters", "contexts", "users", "cluster", "context", "user", "exec"),
)
"""Fields of a kubeconfig that hold other fields."""
_SAFE_FIELDS = frozenset(
    (
        *("current-context", "name", "cluster", "namespace", "server", "tls-server-name"),
        *("insecure-skip-tls-verify", "certificate-authority", "client-certificate"),
        *("client-key", "tokenFile", "as", "command"),
    )
)
"""Those that hold no secret: names, addresses and paths."""


def without_secrets(text: str) -> str:
    """Return a text without what looks like a secret."""
    lower = text.lower()
    for words, pattern, instead in _PATTERNS:
        if any(word in lower for word in words):
            text = pattern.sub(instead, text)
    if any(word in lower for word in _NAMED_WORDS):
        text = "\n".join(map(_without_named, text.split("\n")))
    return without_password(text)


def _without_named(line: str) -> str:
    lower = line.lower()
    if any(word in lower for word in _NAMED_WORDS):
        return _NAMED.sub(rf'\1"{REMOVED}"', line)
    return line


def safe_words(words: Iterable[str]) -> list[str]:
    """Return a command line without the values of flags that are called like a secret."""
    found, hidden = list[str](), False
    for word in words:
        found.append(REMOVED if hidden else without_secrets(word))
        hidden = _SECRET_FLAG.fullmatch(word) is not None
    return found


def safe_environment(lines: Iterable[str]) -> list[str]:
    """Return variables as NAME=VALUE; values only of those that are known to be harmless."""
    found = []
    for line in sorted(filter(None, lines)):
        name, _, value = line.partition("=")
        safe = _SAFE_VARIABLES.match(name) is not None
        found.append(without_secrets(f"{name}={value}") if safe else f"{name}={REMOVED}")
    return found


def safe_kubeconfig(value: Any) -> Any:
    """Return a kubeconfig, or a part of one, with the values of harmless fields only."""
    if isinstance(value, list):
        return [safe_kubeconfig(each) for each in value]
    if not isinstance(value, Mapping):
        return REMOVED
    found = {}
    for key, each in value.items():
        nested = isinstance(each, Mapping | list)
        if key not in (_NESTED if nested else _SAFE_FIELDS):
            found[key] = REMOVED
        else:
            found[key] = safe_kubeconfig(each) if nested else each
    return found
