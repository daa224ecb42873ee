from . import mean_field as mean_field
from . import paper as paper
from . import sensitivity as sensitivity
from . import variants as variants
from . import worst_case as worst_case
