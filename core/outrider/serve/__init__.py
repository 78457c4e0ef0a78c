"""The server: an API as OpenAI's, over an engine in a process of its own.

Nothing is imported here. :func:`outrider.serve.app.create_app` makes the application, :mod:`outrider.serve.service` is what
its routes call, and :mod:`outrider.serve.command` is ``outrider serve``. All but the last need the extra ``serve``.
"""
