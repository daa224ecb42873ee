"""What the training examples are made of: books, plan of the learning rate, step, log of σ, export."""
