"""iptables mode: upstream's chains by their public names; a sync writes only the difference."""
