"""Pages for operators: the answers of `operate/`, live in a browser."""
