"""What the process tells people about itself."""
