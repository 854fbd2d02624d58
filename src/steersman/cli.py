"""The `steersman` command."""


def main() -> int:
    """Run the command line; return the exit status."""
    raise NotImplementedError
