"""Guess who made a rule of netfilter, by the names of its table and chains. Pure."""

from __future__ import annotations

import re

ANOTHER = "another program"
"""Owner of a rule whose names say nothing."""

_PROGRAMS = (
    (re.compile(r"KUBE-(FIREWALL|KUBELET-CANARY|IPTABLES-HINT|MARK-DROP)$"), "kubelet"),
    (re.compile(r"KUBE-NWPLCY|KUBE-POD-FW|KUBE-ROUTER|KUBE-SRC-|KUBE-DST-"), "kube-router"),
    (re.compile(r"KUBE-|kube-proxy$|kube-proxy-"), "kube-proxy"),
    (re.compile(r"DOCKER|docker"), "Docker"),
    (re.compile(r"cali-|calico"), "Calico"),
    (re.compile(r"CILIUM_|OLD_CILIUM_"), "Cilium"),
    (re.compile(r"ANTREA-"), "Antrea"),
    (re.compile(r"FLANNEL-|flannel"), "Flannel"),
    (re.compile(r"WEAVE-"), "Weave Net"),
    (re.compile(r"CNI-|cni_"), "a CNI plugin"),
    (re.compile(r"NETAVARK"), "Podman"),
    (re.compile(r"ISTIO_"), "Istio"),
    (re.compile(r"LIBVIRT_|LIBVIRT-"), "libvirt"),
    (re.compile(r"ufw6?-"), "ufw"),
    (re.compile(r"firewalld$|(INPUT|FWD|IN|PRE|POST)_(ZONES|public|direct)"), "firewalld"),
    (re.compile(r"f2b-|fail2ban"), "fail2ban"),
    (re.compile(r"ts-(input|forward|postrouting)"), "Tailscale"),
    (re.compile(r"sshuttle-"), "sshuttle"),
    (re.compile(r"AWS-|ip-masq"), "the cloud's node agent"),
)
_JUMPS_TO = re.compile(r"(?:^|\s)(?:-j|-g|jump|goto)\s+(\S+)")


def owner_of(table: str, chain: str, rule: str, *, base: bool) -> str:
    """Return the name of the program that most likely made a rule.

    Args:
        table: its table, without the family.
        chain: its chain.
        rule: its text.
        base: whether the chain belongs to a hook, so that many programs write to it; the chain
            that the rule leads to then tells more.
    """
    target = _JUMPS_TO.search(rule)
    names = [target[1] if target else "", table] if base else [chain, table]
    for name in names:
        for pattern, program in _PROGRAMS:
            if pattern.match(name):
                return program
    return ANOTHER
