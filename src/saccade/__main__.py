"""The `saccade` command, and `python -m saccade`."""

import signal

# An interrupt while the modules load ends the process without a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from saccade.cli import app as cli  # noqa: E402


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
