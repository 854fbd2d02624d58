"""What a release consists of: built as `make release` builds it, installed and run."""
