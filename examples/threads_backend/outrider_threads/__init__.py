"""An Outrider backend whose streams are threads.

Read it in this order: `worker` (a stream: a thread with a queue), `queueing` (torch calls become tasks), `backend` (the
verbs of the backend interface on top of them), `plugin` (how Outrider finds it).
"""
