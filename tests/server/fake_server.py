"""The real server in its own process, with a scripted engine.

    python -m tests.server.fake_server FOLDER SECONDS

Prints its address when it answers and, at the end, whether torch was ever imported; exits as `serve` says.
SECONDS is the time running answers get after SIGTERM.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from saccade.config import ServeConfig
from saccade.server.launch import serve
from tests.server.fakes import FakeLink, make_processor


async def main(folder: Path, seconds: float) -> int:
    link = FakeLink()
    link.pause = 0.01
    config = ServeConfig(port=0, shutdown_timeout=seconds)
    return await serve(make_processor(folder), link, config, on_started=lambda url: print(url, flush=True))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(main(Path(sys.argv[1]), float(sys.argv[2])))
    print("torch was imported" if "torch" in sys.modules else "no torch", flush=True)
    sys.exit(status)
