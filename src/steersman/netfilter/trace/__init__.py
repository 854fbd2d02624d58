"""What netfilter reports about a traced packet, whoever made the rules."""
