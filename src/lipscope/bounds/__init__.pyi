from .ball import certified_radius as certified_radius
from .bound import Bound as Bound
from .bound_table import BoundTable as BoundTable
from .bound_table import table as table
from .registry import evaluate as evaluate
from .registry import names as names
