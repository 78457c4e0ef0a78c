"""Several ranks that run one engine together: who they are, and what the first one tells the others."""
