"""From a model and a text to attention maps: the seam, record and replay, named models, corpora."""
