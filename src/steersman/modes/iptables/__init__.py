"""iptables mode: upstream's chains by their public names, written by what changed."""
