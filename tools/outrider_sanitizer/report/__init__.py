"""The report of a watched run: findings, advice, and the source lines that both name."""
