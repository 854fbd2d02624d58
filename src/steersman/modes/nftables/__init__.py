"""The nftables mode: a fixed skeleton of rules, everything that changes as elements of maps."""
