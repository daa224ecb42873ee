"""Smoother attention in a trained model: rescale W_Q and W_K until the logits, or σ, stay below a target."""
