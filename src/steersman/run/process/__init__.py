"""The process: its parts, its start and end, its mode and its configuration."""
