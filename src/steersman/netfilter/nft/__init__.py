"""nf_tables over netlink: messages, expressions, tables with an owner, generations."""
