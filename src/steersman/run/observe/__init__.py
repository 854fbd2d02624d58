"""What follows from a sync: metrics, Events, logs, conntrack clean-up, failover."""
