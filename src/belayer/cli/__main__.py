"""`python -m belayer.cli`, the same as the `belayer` command."""

from belayer.cli.app import main

main()
