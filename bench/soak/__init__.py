"""A server at twice its capacity for as long as you like, among clients that behave badly.

    python -m bench.soak [MODEL] [--minutes 30] [-- OPTIONS OF saccade serve]

`traffic.py` makes the requests, `clients.py` sends them (and leaves, and is killed), `watch.py` reads what
the server's processes hold, `verdict.py` says what must not be.
"""
