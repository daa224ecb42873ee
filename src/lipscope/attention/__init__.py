"""What is measured: attention layers, masks, score rules, and their Jacobians as operators."""
