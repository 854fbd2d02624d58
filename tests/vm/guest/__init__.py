"""Tests that run inside the virtual machine."""
