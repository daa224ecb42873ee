"""The experiments of the paper *How Smooth Is Attention?* and the estimator of its public scripts."""
