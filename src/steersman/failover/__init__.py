"""Failover: endpoints that do not answer get no new connections.

The theory. A client notices a silent endpoint after one second (its first SYN retransmission), and
so does the node, which sees that packet. One such observation proves little: a NetworkPolicy may
drop the client's packets, the endpoint may be overloaded for a moment, a packet may be lost. So an
observation only makes the endpoint suspect, and the node confirms it with probes of its own:

    healthy --observation--> suspect --every probe failed--> down --hold, then a probe answers--+
       ^                        |                                                               |
       +----- a probe answers --+                                                               |
       +----------------------------------------------------------------------------------------+

A confirmed silent endpoint makes the others of its node suspect at once, so that a dead node costs
its Services two seconds and not two seconds for each endpoint that a client happens to meet.

What keeps a healthy endpoint in:

1. A probe that answers clears the suspicion. If that happened in the last minute (packets get lost
   here, or it is overloaded), twice as many probes must fail; and the more probes of living
   endpoints of its pool failed before they answered, the more must fail, up to 20. If half of the
   living ones lost some, no silent one is ejected: otherwise an overload would eject endpoints, and
   the load that moves to the others would get these ejected, too.
2. An endpoint is ejected from a pool only if another one of that pool answered a probe since the
   suspicion began. Otherwise this node's own link may be down, or a policy may deny the probes, and
   there is no better choice anyway. Probes of up to three others of its pools, on other nodes if
   there are any, run at the same time for that; of other pools if it is alone.
3. Probes that fail, or are refused, are believed only of an endpoint that answered one before, or
   that failed two client addresses: a policy may deny the node's probes of one endpoint, and a
   client its packets. So that this is known, each new endpoint is probed once, a few at a time. If
   this node itself connects for its clients, they cannot reach one that denies the node either.
4. At most 90 % of a pool are ejected; 50 % if they are not confirmed (a mode that counts successes
   may eject before the probes have ended, but not before the first has had its time). At least one
   stays, and all of them if all are down.
5. An ejection ends when Kubernetes says something new about the endpoint, and at the latest when a
   probe answers after the hold: 10 s, doubled with each ejection in a row up to 300 s.

UDP has no handshake: its endpoints are ejected if ICMP says that nobody listens (confirmed by two
datagrams), or with a dead node: one on which at least two addresses are down, and none answers.
An endpoint of the same owner (namespace) must be among them: nobody can have another one's endpoint
ejected by claiming that blackholes are on its node. They return with the first TCP endpoint of the
node.

Time passes also for this process, and it may be late. So a series ends when all its probes have
been reported, not when they should have been. A probe may also be lost: the mode that watches is
replaced, or no socket is left. That proves nothing, and no state waits for ever: states.py.
"""
