"""The last release replaced by this version and back, on a node under traffic."""
