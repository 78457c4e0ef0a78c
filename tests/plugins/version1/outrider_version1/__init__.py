"""A backend as it was written for the version before, kept as it was: it shows that such a plugin still works.

Don't bring it up to date. It goes when the old names go.
"""
