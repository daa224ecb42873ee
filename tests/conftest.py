import torch

# Two pytest workers share two cores; one thread each is faster than two each, and keeps sums reproducible.
torch.set_num_threads(1)
