"""The page of a run: one HTML file that makes no requests, written by `overland report`.

`summary.py` gathers everything from the run folder, `sessions.py` its history; `lines.py` reads the
metrics, `charts.py` and `svg.py` draw them, `page.py` puts the page together, and `serve.py` keeps
it up to date.
"""
