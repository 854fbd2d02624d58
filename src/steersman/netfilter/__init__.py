"""What the modes that use netfilter share: iptables, nf_tables over netlink, conntrack."""
