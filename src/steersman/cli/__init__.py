"""The command line: parse the words, call a library function, print its answer."""
