"""lipscope: how smooth is attention? The local Lipschitz constant of attention, as an interval with its story.

The public names load on first use, so that ``lipscope --help`` does not wait for torch.
"""

from lipscope.doors import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
