"""σ of a layer or map at tokens: one verb, its memory, its certificate, its gradient, and which token moves which."""
