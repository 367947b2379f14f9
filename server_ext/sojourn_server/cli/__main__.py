"""``python -m sojourn_server.cli``: the ``sojourn`` command, for machines where its script is not on the
PATH."""

from sojourn_server.cli import main

main()
