"""All checks of doctor that are about one Service, in the order of its documentation."""

from __future__ import annotations

from steersman.operate.doctor.service_api import API_CHECKS
from steersman.operate.doctor.service_listener import LISTENER_CHECKS
from steersman.operate.doctor.service_object import OBJECT_CHECKS
from steersman.operate.doctor.service_policy import POLICY_CHECKS
from steersman.operate.doctor.traffic_checks import DIAL_CHECKS
from steersman.operate.doctor.traffic_load import LOAD_CHECKS

SERVICE_CHECKS = (
    *OBJECT_CHECKS,
    *API_CHECKS,
    *POLICY_CHECKS,
    *LISTENER_CHECKS,
    *DIAL_CHECKS,
    *LOAD_CHECKS,
)
