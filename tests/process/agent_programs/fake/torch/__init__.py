"""A torch without tensors: the few modules, classes and names that the agent hooks, working. For Pythons without torch.

``FAKE_TORCH`` lists what is strange about it.
"""

import os

STRANGE = os.environ.get("FAKE_TORCH", "").split(",")
from torch import version  # noqa: E402, F401, I001 - first, as in torch: the agent asks for it when utils comes
from torch.serialization import save  # noqa: E402, F401
from torch import autograd, compiler, optim, utils  # noqa: E402, F401
