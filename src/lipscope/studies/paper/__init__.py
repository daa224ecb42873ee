"""The experiments of the paper *How Smooth Is Attention?* and the estimator of its public scripts."""

from lipscope.studies.paper.differences import companion_estimator

__all__ = ["companion_estimator"]
