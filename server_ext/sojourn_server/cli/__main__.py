"""``python -m sojourn_server.cli``: the ``sojourn`` command where its script is not on the path."""

from sojourn_server.cli import main

main()
