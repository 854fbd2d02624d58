"""The whole process for hours on the real kernel: churn, faults and traffic, in every mode.

    make soak HOURS=3
    python -m tests.soak --hours 0.1 --modes nftables,ebpf --seed 7

Each mode has a node of its own (network namespaces, cgroup, bpffs) and an API server, and all of
them run side by side. Services and endpoints change at random; now and then something breaks (see
node.Fault). Six Services always keep one endpoint, and clients connect to them all the time: a
connection that fails while nothing is broken fails the soak, unless this machine stood still.

At the end the world becomes a fixed one, and the old process is compared with a new one that starts
on the same node after `steersman cleanup`: memory, descriptors, threads, and what the kernel has.
"""
