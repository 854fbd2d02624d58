"""The checks of `steersman doctor`: the table of all of them. ask.py runs it."""

from __future__ import annotations

from typing import Final

from steersman.operate.doctor.check import Check
from steersman.operate.doctor.node_conntrack import CONNTRACK_CHECKS
from steersman.operate.doctor.node_firewall import FIREWALL_CHECKS
from steersman.operate.doctor.node_path import PATH_CHECKS
from steersman.operate.doctor.node_process import PROCESS_CHECKS
from steersman.operate.doctor.node_rules import RULES_CHECKS
from steersman.operate.doctor.node_sysctl import SYSCTL_CHECKS
from steersman.operate.doctor.service_checks import SERVICE_CHECKS

CHECKS: Final[tuple[Check, ...]] = (
    *SERVICE_CHECKS,
    *PROCESS_CHECKS,
    *RULES_CHECKS,
    *FIREWALL_CHECKS,
    *SYSCTL_CHECKS,
    *CONNTRACK_CHECKS,
    *PATH_CHECKS,
)
"""Every check. Order does not matter: they run together."""
