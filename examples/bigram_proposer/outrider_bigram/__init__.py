"""A proposer plugin in its own package: `proposer` drafts, `plugin` registers it."""
