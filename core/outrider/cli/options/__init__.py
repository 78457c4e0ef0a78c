"""Options that several commands share, the checks of their values, and what they load or start."""
