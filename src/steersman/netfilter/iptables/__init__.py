"""The programs of iptables, and the text that they read and print."""
