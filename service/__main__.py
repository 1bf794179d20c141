"""``python -m tierkv.service``: the command line, for where the script is not on the path."""

from tierkv.service.cli import main

main()
