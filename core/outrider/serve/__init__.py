"""HTTP server with the APIs of OpenAI and Anthropic. The engine runs in a separate process.

:func:`outrider.serve.http.app.create_app` creates the application. Its routes call :mod:`outrider.serve.api.service`. The
command ``outrider serve`` is :mod:`outrider.serve.command`. Every module except the command and its roles needs the extra
``serve``. Importing this package imports none of them.
"""
