from .ball import certified_radius as certified_radius
from .bound import Bound as Bound
from .registry import evaluate as evaluate
from .registry import names as names
from .registry import table as table
