"""The ipvs mode: the kernel's own load balancer, ipsets and a few iptables rules (README.md)."""
