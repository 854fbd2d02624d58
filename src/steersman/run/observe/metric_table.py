"""The table of all metrics: upstream's with their types, labels and buckets, and our own.

Each metric is one attribute (behaviour 14), and docs/metrics.md lists them all. The program counts
those that are `Counted`; the others are made when they are scraped, from values that are known
elsewhere (sync_metrics.py, scraped.py, mode_metrics.py). A metric that the row of some mode names
(modes/specs.py) belongs to these modes only.
"""

from __future__ import annotations

from steersman.run.observe.prometheus import Counted, Counter, Declared, Gauge, Histogram, Registry

SYNC_BUCKETS = tuple(0.001 * 2**k for k in range(15))
PROGRAMMING_BUCKETS = (
    0.25,
    0.5,
    *(float(n) for n in range(1, 60)),
    *(float(n) for n in range(60, 116, 5)),
    *(float(n) for n in range(120, 301, 30)),
)
_PHASE_BUCKETS = tuple(0.0001 * 4**k for k in range(10))
_FAMILY = ("ip_family",)
_SERVICE_PORT = ("namespace", "service", "port", "protocol")
_ENDPOINT, _FRONTEND = (*_SERVICE_PORT, "endpoint"), (*_SERVICE_PORT, "frontend")
_PROXY, _SYNC = "kubeproxy_", "kubeproxy_sync_proxy_rules_"


class MetricTable(Registry):
    """Every metric."""

    # fmt: off

    # Upstream's

    sync_seconds = Counted(Histogram, f"{_SYNC}duration_seconds", "Seconds that a sync took.",
        _FAMILY, buckets=SYNC_BUCKETS)
    full_sync_seconds = Counted(Histogram, f"{_PROXY}sync_full_proxy_rules_duration_seconds",
        "Seconds that a full sync took.", _FAMILY, buckets=SYNC_BUCKETS)
    partial_sync_seconds = Counted(Histogram, f"{_PROXY}sync_partial_proxy_rules_duration_seconds",
        "Seconds that a sync of only the changes took.", _FAMILY, buckets=SYNC_BUCKETS)
    programming_seconds = Counted(Histogram, f"{_PROXY}network_programming_duration_seconds",
        "Seconds from the change of an endpoint (its trigger time) until it is in force.", _FAMILY,
        buckets=PROGRAMMING_BUCKETS)
    last_sync_time = Declared(Gauge, f"{_SYNC}last_timestamp_seconds",
        "Unix time of the last successful sync.", _FAMILY)
    last_queued_time = Declared(Gauge, f"{_SYNC}last_queued_timestamp_seconds",
        "Unix time at which a sync was last queued.", _FAMILY)
    endpoint_changes_pending = Declared(Gauge, f"{_SYNC}endpoint_changes_pending",
        "Number of endpoint changes not yet synced.")
    endpoint_changes = Declared(Counter, f"{_SYNC}endpoint_changes_total",
        "Number of endpoint changes seen.")
    service_changes_pending = Declared(Gauge, f"{_SYNC}service_changes_pending",
        "Number of Service changes not yet synced.")
    service_changes = Declared(Counter, f"{_SYNC}service_changes_total",
        "Number of Service changes seen.")
    iptables_rules = Counted(Gauge, f"{_SYNC}iptables_total",
        "Number of rules in the kernel that belong to the proxy.", ("table", *_FAMILY))
    iptables_rules_written = Counted(Gauge, f"{_SYNC}iptables_last",
        "Number of rules that the last sync wrote.", ("table", *_FAMILY))
    iptables_restore_failures = Counted(Counter, f"{_SYNC}iptables_restore_failures_total",
        "Number of iptables-restore runs that failed.", _FAMILY)
    iptables_partial_restore_failures = Counted(Counter,
        f"{_SYNC}iptables_partial_restore_failures_total",
        "Number of iptables-restore runs that failed while only changes were written.", _FAMILY)
    nftables_sync_failures = Counted(Counter, f"{_SYNC}nftables_sync_failures_total",
        "Number of nf_tables transactions that the kernel refused.", _FAMILY)
    nftables_cleanup_failures = Counted(Counter, f"{_SYNC}nftables_cleanup_failures_total",
        "Number of removals of leftovers that the kernel refused.", _FAMILY)
    no_local_endpoints = Declared(Gauge, f"{_SYNC}no_local_endpoints_total",
        "Number of ServicePorts with a Local policy that have endpoints, but none on this node.",
        ("traffic_policy", *_FAMILY))
    healthz = Counted(Counter, f"{_PROXY}proxy_healthz_total", "Number of answers of /healthz.",
        ("code",))
    livez = Counted(Counter, f"{_PROXY}proxy_livez_total", "Number of answers of /livez.",
        ("code",))
    conntrack_seconds = Counted(Histogram, f"{_PROXY}conntrack_reconciler_sync_duration_seconds",
        "Seconds that a conntrack clean-up took.", _FAMILY, buckets=SYNC_BUCKETS)
    conntrack_deleted = Counted(Counter, f"{_PROXY}conntrack_reconciler_deleted_entries_total",
        "Number of stale conntrack entries deleted.", _FAMILY)

    # Beyond upstream

    findings = Declared(Gauge, "steersman_findings",
        "Number of current problems with objects or configuration.", ("severity", "code"))
    phase_seconds = Counted(Histogram, "steersman_sync_phase_seconds",
        "Seconds that a phase of a sync took.", ("phase",), buckets=_PHASE_BUCKETS)
    syncs = Counted(Counter, "steersman_syncs_total", "Number of syncs by reason and outcome.",
        ("reason", "outcome"))
    kernel_objects = Counted(Gauge, "steersman_kernel_objects",
        "Number of kernel objects of the proxy in force.")
    kernel_writes = Counted(Counter, "steersman_kernel_writes_total",
        "Number of kernel objects written.", ("change",))
    refused_service_ports = Counted(Gauge, "steersman_refused_service_ports",
        "Number of ServicePorts that the kernel refuses.")
    drift_repairs = Counted(Counter, "steersman_drift_repairs_total",
        "Number of repairs of changes that other programs made to our kernel objects.")
    drift_objects = Counted(Counter, "steersman_drift_objects_total",
        "Number of kernel objects that were repaired.")
    drift_pending_since = Counted(Gauge, "steersman_drift_pending_since_timestamp_seconds",
        "Unix time since which changes by other programs are not repaired; 0 if all are repaired.")
    without_endpoints = Declared(Gauge, "steersman_service_ports_without_endpoints",
        "Number of ServicePorts that no endpoint serves: connections to them are refused.", _FAMILY)
    drift_last = Counted(Gauge, "steersman_drift_last_timestamp_seconds",
        "When changes by other programs were found last, in seconds since 1970; 0 if never.")
    ejections = Counted(Counter, "steersman_endpoint_ejections_total",
        "Number of endpoints that were ejected because they did not answer.", ("reason",))
    ejected = Counted(Gauge, "steersman_endpoints_ejected",
        "Number of endpoints that get no new connections now because they do not answer.")
    mode_fallback = Counted(Gauge, "steersman_mode_fallback",
        "1 if another mode than the wanted one runs.", ("wanted", "used"))

    # Known elsewhere

    requests = Declared(Counter, "rest_client_requests_total",
        "Number of requests to the API server by status; <error> if there was no answer.",
        ("code", "method", "host"))
    request_seconds = Declared(Histogram, "rest_client_request_duration_seconds",
        "Seconds until an answer of the API server began; without watches.", ("verb", "host"))
    feature_enabled = Declared(Gauge, "kubernetes_feature_enabled",
        "1 if a feature gate that has an effect here is on, else 0.", ("name", "stage"))
    build_info = Declared(Gauge, "kubernetes_build_info",
        "The version that runs, with the constant value 1.", ("git_version",))
    conntrack_entries = Declared(Gauge, "steersman_conntrack_entries",
        "Number of entries in the conntrack table.")
    conntrack_limit = Declared(Gauge, "steersman_conntrack_entries_limit",
        "Number of entries that the conntrack table can hold.")
    invalid_packets_dropped = Declared(Counter,
        "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
        "Number of packets that were dropped because conntrack found them invalid.")
    localhost_node_port_packets = Declared(Counter,
        "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
        "Number of packets accepted on node ports of loopback addresses.")
    watch_errors = Declared(Counter, "steersman_watch_errors_total",
        "Number of failed requests and watches.", ("kind", "reason"))
    source_connected = Declared(Gauge, "steersman_source_connected",
        "1 while a watch of this kind of object is open at the API server, else 0.", ("kind",))
    source_quiet = Declared(Gauge, "steersman_source_quiet_seconds",
        "Seconds since the API server last sent anything.")
    condition = Declared(Gauge, "steersman_condition",
        "1 for the status that a condition of the process has (true, false or unknown), else 0.",
        ("condition", "status"))
    condition_since = Declared(Gauge, "steersman_condition_since_timestamp_seconds",
        "Unix time at which a condition of the process got its status.", ("condition",))
    oldest_change = Declared(Gauge, "steersman_oldest_change_waiting_seconds",
        "Seconds that the oldest change not yet in force has been waiting; 0 if none waits.")
    service_ports = Declared(Gauge, "steersman_service_ports",
        "Number of ServicePorts planned, in both families.")
    loop_holds = Declared(Histogram, "steersman_event_loop_hold_seconds",
        "Seconds of an iteration of the event loop, during which nothing else is answered.",
        ("clock",))
    virtual_memory = Declared(Gauge, "process_virtual_memory_bytes",
        "Virtual memory size in bytes.")
    max_virtual_memory = Declared(Gauge, "process_virtual_memory_max_bytes",
        "Maximum size of virtual memory in bytes; +Inf if it is unlimited.")
    resident_memory = Declared(Gauge, "process_resident_memory_bytes",
        "Resident memory size in bytes.")
    start_time = Declared(Gauge, "process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.")
    cpu_seconds = Declared(Counter, "process_cpu_seconds_total",
        "Total user and system CPU time spent in seconds.")
    open_fds = Declared(Gauge, "process_open_fds", "Number of open file descriptors.")
    max_fds = Declared(Gauge, "process_max_fds", "Maximum number of open file descriptors.")
    received_bytes = Declared(Counter, "process_network_receive_bytes_total",
        "Number of bytes that the network namespace of the process has received.")
    sent_bytes = Declared(Counter, "process_network_transmit_bytes_total",
        "Number of bytes that the network namespace of the process has sent.")

    # What modes count: sums of the node

    forwarded_connections = Declared(Counter, "steersman_forwarded_connections_total",
        "Number of connections to endpoints of all Services.")
    forwarded_packets = Declared(Counter, "steersman_forwarded_packets_total",
        "Number of packets passed on for all Services.", ("direction",))
    forwarded_bytes = Declared(Counter, "steersman_forwarded_bytes_total",
        "Number of bytes passed on for all Services.", ("direction",))
    failed_dials = Declared(Counter, "steersman_failed_dials_total",
        "Number of dials refused or not answered.")
    dial_seconds = Declared(Histogram, "steersman_dial_seconds",
        "Seconds until an endpoint answered.")
    proxied_connections = Declared(Gauge, "steersman_proxied_connections",
        "Number of open connections.")
    refused_connections = Declared(Counter, "steersman_refused_connections_total",
        "Number of connections and datagrams refused for want of descriptors.")
    mode_events = Declared(Counter, "steersman_mode_events_total",
        "Number of times that something happened to packets and sockets.", ("event",))
    table_entries = Declared(Gauge, "steersman_mode_table_entries",
        "Number of entries in a table of connections.", ("table",))
    table_capacity = Declared(Gauge, "steersman_mode_table_capacity",
        "Number of entries that a table of connections can hold.", ("table",))

    # The same by Service

    connections = Declared(Counter, "steersman_connections_total",
        "Number of connections made to an endpoint.", _ENDPOINT)
    proxied_packets = Declared(Counter, "steersman_proxied_packets_total",
        "Number of packets of an endpoint.", (*_ENDPOINT, "direction"))
    proxied_bytes = Declared(Counter, "steersman_proxied_bytes_total",
        "Number of bytes passed on for an endpoint.", (*_ENDPOINT, "direction"))
    dial_failures = Declared(Counter, "steersman_dial_failures_total",
        "Number of dials refused or not answered.", _ENDPOINT)
    endpoint_dial_seconds = Declared(Counter, "steersman_endpoint_dial_seconds_total",
        "Seconds until an endpoint answered.", _ENDPOINT)
    frontend_connections = Declared(Counter, "steersman_frontend_connections_total",
        "Number of connections to a destination.", _FRONTEND)
    frontend_packets = Declared(Counter, "steersman_frontend_packets_total",
        "Number of packets of a destination.", (*_FRONTEND, "direction"))
    frontend_bytes = Declared(Counter, "steersman_frontend_bytes_total",
        "Number of bytes of a destination.", (*_FRONTEND, "direction"))
    # fmt: on


DECLARED = tuple(each for each in vars(MetricTable).values() if isinstance(each, Declared))
"""Every metric, in order."""
