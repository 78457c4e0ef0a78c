"""Sources of plugins that harm the process which loads them."""

HARMFUL = {
    "hangs": ("import time; time.sleep(600)", "wasn't loaded within"),
    "exits": ("import os; os._exit(3)", "ends the process with exit code 3"),
    "crashes": ("import os; os.abort()", "ends the process with SIGABRT"),
}
"""What it does: its source, and what is said of it."""
