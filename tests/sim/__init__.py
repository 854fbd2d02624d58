"""Deterministic simulation: years of a node's life in minutes, in the manner of FoundationDB.

Theory. The program is the real one: Daemon, sources, Store, Planner, Sync, Runner, observers,
health, metrics and servers, down to the bytes of HTTP and netlink. The world outside
of the process is simulated, and it fails in every way that the real one does:

    clocks.py    the clocks of `time`; the wall clock can be set
    universe.py  virtual time, one heap of events, and an event loop per process
    network.py   TCP: latency, refusals, silence, resets, no descriptors
    cluster.py   etcd and API servers: 403, 410, 429, stale caches, fail-over, restored backups
    kernel.py    rules: busy, refused, half applied, done but not answered, edited by others
    endpoints.py endpoints that fail, TCP clients, what the kernel tells of both, ejections judged
    netlink.py   interfaces and conntrack: lost notifications, interrupted dumps, ENOBUFS
    clients.py   UDP clients and what conntrack remembers of them
    lock.py      the lock that lets one instance run on a node
    node.py      the machine: processes and their supervisor, kill -9, SIGTERM, configuration
    life.py      what happens, as the dice say: episodes of changes, trouble and recovery
    trouble.py   everything that goes wrong
    failing.py   endpoints that fail, and probes that are interrupted
    switches.py  live switches of the mode, disturbed in every step
    hostile.py   hostile clients of the process's servers
    objects.py   Services and slices: of tenants, and those that nobody changes
    oracle.py    what must be true, at every transaction and whenever all is at rest
    seeds.py     one seed with its history, or many on all cores
    mutations.py old defects, put back to see that they are found

Nothing waits: the clock jumps to the next event. All choices come from one generator, so the same
seed gives the same history, byte for byte (PYTHONHASHSEED is set, sets of tasks are ordered, the
collector is off while a seed runs). Each callback of a process costs a little virtual time, and
rendering costs more, so that what holds the loop is late in the simulation, too.

A failure prints its seed and the end of the history; `python -m tests.sim --seed N --hours H`
replays it. After a change of the simulation itself a seed means another life.
"""
