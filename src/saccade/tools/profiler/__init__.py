"""`saccade profile`: where the time of a picture, a prompt and a decode step goes, kernel by kernel.

`options.py` what to look at; `sections.py` runs it; `trace.py` reads what torch's profiler recorded;
`report.py` the tables; `command.py` the order of it all.
"""
