"""Try Services of our own by real packets: on this node, or by pods on the nodes of a cluster."""
