"""Reports: one HTML file that shows how smooth a model is, where it is not, and why; charts for print and page; a live view.

Nothing here needs torch, and the names load on first use.
"""

from lipscope.doors import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
