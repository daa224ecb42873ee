from . import bounds as bounds
from . import masks as masks
from . import report as report
from . import runs as runs
from . import studies as studies
from . import training as training
from .attention.family import variant as variant
from .attention.layer import Attention as Attention
from .attention.norms import LayerNorm as LayerNorm
from .attention.norms import RMSNorm as RMSNorm
from .attention.rotary import Rotary as Rotary
from .bounds.ball import certify as certify
from .measure.influence import influence as influence
from .measure.sigma import local_lipschitz as local_lipschitz
from .models.load import load as load
from .models.model import Model as Model
from .runs.scan import Scan as Scan
from .runs.scan import scan as scan
from .spectral.autodiff import AutodiffOperator as AutodiffOperator
from .spectral.golub_kahan import GolubKahan as GolubKahan
from .spectral.operator import Operator as Operator
from .spectral.result import SpectralNorm as SpectralNorm
from .spectral.solvers import Auto as Auto
from .spectral.solvers import Dense as Dense
from .spectral.solvers import spectral_norm as spectral_norm
from .training.rescale.smooth import smooth as smooth

__version__: str
