"""Reports: one HTML file that shows how smooth a model is, where it is not, and why; charts for print and page; a live view.

Nothing here needs torch, and the names load on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
