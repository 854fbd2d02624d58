"""The doors to this machine: subprocesses, netlink sockets, sysctls, facts."""
