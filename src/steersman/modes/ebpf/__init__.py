"""The ebpf mode: connections are balanced when they are made, packets on devices for the rest."""
