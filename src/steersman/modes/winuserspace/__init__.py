"""The winuserspace mode: the userspace proxy on addresses that netsh adds to an interface."""
