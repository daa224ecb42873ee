"""``python -m lipscope``."""

from lipscope.cli.main import main

main()
