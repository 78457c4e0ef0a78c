"""An Outrider backend whose streams are threads.

Read the modules in this order: `worker` (a stream: a thread with a queue), `queueing` (torch calls become tasks), `backend`
(the methods of the backend interface), `plugin` (the entry point).
"""
