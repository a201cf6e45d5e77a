from torch.utils.data._utils import fetch, pin_memory, worker  # noqa: F401
