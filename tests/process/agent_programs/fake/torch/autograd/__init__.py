from torch import STRANGE

if "no_backward" not in STRANGE:

    def backward(loss):
        return None
