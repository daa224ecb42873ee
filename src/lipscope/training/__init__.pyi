from .huggingface import LipschitzCallback as LipschitzCallback
from .model_penalty import ModelPenalty as ModelPenalty
from .monitor import Monitor as Monitor
from .penalties import jasmin_penalty as jasmin_penalty
from .penalties import max_logit_penalty as max_logit_penalty
from .penalties import spectral_penalty as spectral_penalty
from .penalties import weight_penalty as weight_penalty
from .readings import Threshold as Threshold
