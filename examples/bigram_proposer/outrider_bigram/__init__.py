"""A proposer from outside of Outrider: `proposer` drafts, `plugin` is how it is found."""
