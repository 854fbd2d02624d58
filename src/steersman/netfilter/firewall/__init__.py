"""What the rules of any program would do to a packet."""
