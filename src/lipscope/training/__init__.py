"""σ while a model trains: monitors that watch it, penalties that hold it down, and queries and keys rescaled afterwards.

``Monitor(model).step(batch)`` serves hand-written loops, ``LipschitzCallback`` the Hugging Face ``Trainer``, and
``lipscope.training.lightning.LipschitzCallback`` Lightning. Training goes on bit for bit as if nothing were watched.
``spectral_penalty`` is σ itself; ``jasmin_penalty``, ``max_logit_penalty`` and ``weight_penalty`` are cheaper quantities
that bounds of σ are made of. ``ModelPenalty`` takes any of them over the layers of a Hugging Face model, inside a training
loop.
"""

from lipscope.doors import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
