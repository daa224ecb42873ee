from .ascent import maximise as maximise
from .constructions import NAMES as NAMES
from .constructions import construct as construct
from .constructions import grouped_sigma as grouped_sigma
from .growth_in_n import growth as growth
from .growth_in_n import regime_map as regime_map
from .tokens import attack_tokens as attack_tokens
