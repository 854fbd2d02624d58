"""The checks of `steersman doctor`: the table of all of them. ask.py runs it."""

from __future__ import annotations

from typing import Final

from steersman.operate.doctor.check import Check
from steersman.operate.doctor.node_changes import CHANGE_CHECKS
from steersman.operate.doctor.node_conntrack import CONNTRACK_CHECKS
from steersman.operate.doctor.node_firewall import FIREWALL_CHECKS
from steersman.operate.doctor.node_path import PATH_CHECKS
from steersman.operate.doctor.node_pods import POD_CHECKS
from steersman.operate.doctor.node_process import PROCESS_CHECKS
from steersman.operate.doctor.node_rivals import RIVAL_CHECKS
from steersman.operate.doctor.node_rules import RULES_CHECKS
from steersman.operate.doctor.node_sysctl import SYSCTL_CHECKS
from steersman.operate.doctor.service_api import API_CHECKS
from steersman.operate.doctor.service_listener import LISTENER_CHECKS
from steersman.operate.doctor.service_object import OBJECT_CHECKS
from steersman.operate.doctor.service_policy import POLICY_CHECKS
from steersman.operate.doctor.traffic_checks import DIAL_CHECKS
from steersman.operate.doctor.traffic_load import LOAD_CHECKS
from steersman.operate.doctor.tries_check import TRY_CHECKS

CHECKS: Final[tuple[Check, ...]] = (
    # One Service
    *OBJECT_CHECKS,
    *API_CHECKS,
    *POLICY_CHECKS,
    *LISTENER_CHECKS,
    *DIAL_CHECKS,
    *TRY_CHECKS,
    *LOAD_CHECKS,
    # The node
    *PROCESS_CHECKS,
    *RIVAL_CHECKS,
    *RULES_CHECKS,
    *FIREWALL_CHECKS,
    *CHANGE_CHECKS,
    *SYSCTL_CHECKS,
    *CONNTRACK_CHECKS,
    *PATH_CHECKS,
    *POD_CHECKS,
)
"""Every check, in the order of docs/doctor.md; they run together."""
