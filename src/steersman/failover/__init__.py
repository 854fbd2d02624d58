"""Failover: endpoints that do not answer get no new connections."""
