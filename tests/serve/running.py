"""A real server over an engine in a thread of this process, for tests."""

import asyncio
import contextlib
import threading

import uvicorn

from outrider import Engine
from outrider.serve.api.prompt_builder import PromptBuilder, PromptResources
from outrider.serve.config import ServeConfig
from outrider.serve.connection.engine_process import EngineThread
from outrider.serve.http.app import create_app
from outrider.serve.http.server import LimitedHttpProtocol


class Running:
    """``url`` of the server; ``call(function)`` runs it on the server's event loop with its service."""

    def __init__(self):
        self.url, self.service, self.client, self.loop, self.engine = None, None, None, None, None

    def call(self, function):
        async def called():
            found = function(self.service)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(60)


@contextlib.contextmanager
def running(make, model_dir, *, chat_template=None, response_template=None, **config):
    """``make``: an engine, what makes one, or an engine client."""
    server, ready, failed = Running(), threading.Event(), []
    server.engine = make if isinstance(make, Engine) else None

    async def main():
        server.loop, ended = asyncio.get_running_loop(), asyncio.Event()
        client = server.client = make if hasattr(make, "submit") else EngineThread(make)
        try:
            info = await client.start()
            wording = PromptResources(model_dir, chat_template=chat_template, response_template=response_template)
            prompter = PromptBuilder(model_dir, info, wording)
            app = create_app(client, prompter, ServeConfig(**{"names": ("m",)} | config))
            server.service = app.state.service
            options = {"lifespan": "off", "log_config": None, "access_log": False, "ws": "none", "http": LimitedHttpProtocol}
            uvicorn_ = uvicorn.Server(uvicorn.Config(app, port=0, **options))
            task = asyncio.create_task(uvicorn_.serve())
            while not uvicorn_.started:
                await asyncio.sleep(0.01)
            server.url = "http://127.0.0.1:{1}".format(*uvicorn_.servers[0].sockets[0].getsockname())
            server.stop = ended
            ready.set()
            await ended.wait()
            uvicorn_.should_exit = True
            await task
            server.service.close()
        finally:
            await client.close()

    def run():
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(120)
        if failed:
            raise failed[0]
        yield server
    finally:
        if server.url is not None:
            server.loop.call_soon_threadsafe(server.stop.set)
        thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]
