"""The TCP and UDP proxy of the userspace modes, and the hand-off of its listening sockets."""
