"""``python -m lipscope``."""

from lipscope.cli import main

main()
