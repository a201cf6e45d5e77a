from torch import STRANGE

if "no_compiler" not in STRANGE:

    def is_compiling():
        return False
