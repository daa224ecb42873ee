"""How large σ could be: bounds on whole sets, at one input, and on a ball around one input."""
