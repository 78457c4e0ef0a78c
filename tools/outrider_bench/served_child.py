"""The project's server over random weights, in a process of its own: what ``outrider serve`` runs, but for the weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from outrider.device.errors import OutriderError
from outrider.registry.children import end_with_parent
from outrider.serve.command import run_loop
from outrider.serve.config import ServeConfig
from outrider.serve.engine_process import EngineProcess
from outrider.serve.logs import log_to_stderr
from outrider.serve.prompts import Prompter
from outrider.serve.server import Address, serve
from outrider_bench.served import MODEL, Setup, partial_engine


def main() -> None:
    """Serve until the process is ended. Where the engine can't be made, why is the last that it says."""
    end_with_parent()
    given = json.loads(sys.argv[1])
    make = partial_engine(Setup(**given["setup"]))
    log_to_stderr("json")
    model = Path(given["model"])
    config = ServeConfig(names=(MODEL,))
    address = Address(port=given["port"])
    try:
        run_loop(serve(EngineProcess(make), lambda info: Prompter(model, info), config, address))
    except OutriderError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
