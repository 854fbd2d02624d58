"""One module for each command, with its `COMMAND`; a new module is a new command.

Modules import little at the top, so that no command pays for another one.
"""
