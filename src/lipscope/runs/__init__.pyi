from .engines import Dask as Dask
from .engines import InProcess as InProcess
from .files import export as export
from .plan import Plan as Plan
from .schema import StoreError as StoreError
from .store import Store as Store
from .sweep import run_plan as run_plan
from .tasks import expand as expand
