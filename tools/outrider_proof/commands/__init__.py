"""The command ``outrider explore``, which runs programs under many schedules."""
