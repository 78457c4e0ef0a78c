"""The commands of the core, the table of all commands, and the dispatch of a command line."""
