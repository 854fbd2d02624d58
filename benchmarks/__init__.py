"""Figures of steersman beside those of iptables-restore fed as upstream feeds it."""
