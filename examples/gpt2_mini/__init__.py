"""The parts of ``train_gpt2_mini.py``: books, plan of the learning rate, log of σ, export."""
