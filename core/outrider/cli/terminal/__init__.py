"""Access of a command to its host: streams, signals, files, environment, reports and the torch probe."""
