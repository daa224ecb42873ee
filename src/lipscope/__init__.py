"""lipscope: how smooth is attention? The local Lipschitz constant of attention, as an interval with its story.

The public names load on first use, so that ``lipscope --help`` does not wait for torch.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
