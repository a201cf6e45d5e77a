from torch.optim.optimizer import Optimizer
