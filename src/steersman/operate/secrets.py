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
_NAMED_WORDS = ("token", "passw", "passphrase", "secret", "credential", "key", "-data", "_data")
_NAMED = re.compile(
    rf"""(?i)(["']?{_NAMES}["']?[ \t]*[:=][ \t]*)("[^"\n]*"|'[^'\n]*'|[^\s"',}}]+)"""
)
"""What is called like a secret, in one line; it takes seconds for the rules of a node."""
_SECRET_FLAG = re.compile(rf"(?i)--?{_NAMES}")
_SAFE_VARIABLES = re.compile(r"KUBERNETES_|STEERSMAN_|NO_PROXY$|no_proxy$|PATH$|LANG$|HOSTNAME$")
_SAFE_CLUSTER = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority")
_SAFE_USER = ("client-certificate", "client-key", "tokenFile", "as")


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


def safe_kubeconfig(document: Any) -> dict[str, Any]:
    """Return the harmless part of a kubeconfig: servers, contexts, and the kinds of credentials."""
    whole = document if isinstance(document, Mapping) else {}
    found: dict[str, Any] = {"current-context": whole.get("current-context")}
    found["clusters"] = [
        {
            "name": each.get("name"),
            "cluster": {
                key: value if key in _SAFE_CLUSTER else REMOVED
                for key, value in _mapping(each.get("cluster")).items()
            },
        }
        for each in _mappings(whole.get("clusters"))
    ]
    found["contexts"] = [
        {
            "name": each.get("name"),
            "context": {
                key: value
                for key, value in _mapping(each.get("context")).items()
                if key in ("cluster", "user", "namespace")
            },
        }
        for each in _mappings(whole.get("contexts"))
    ]
    found["users"] = [
        {"name": each.get("name"), "user": _safe_user(_mapping(each.get("user")))}
        for each in _mappings(whole.get("users"))
    ]
    return found


def _safe_user(user: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in user.items():
        if key == "exec":
            found[key] = {"command": _mapping(value).get("command"), "args": REMOVED}
        else:
            found[key] = value if key in _SAFE_USER else REMOVED
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
