from torch import STRANGE

_before, _after = [], []


class _Handle:
    def __init__(self, hooks, hook):
        self.hooks, self.hook = hooks, hook
        hooks.append(hook)

    def remove(self):
        self.hooks.remove(self.hook)


if "no_optimizer_hooks" not in STRANGE:

    def register_optimizer_step_pre_hook(hook):
        return _Handle(_before, hook)

    def register_optimizer_step_post_hook(hook):
        return _Handle(_after, hook)


class Optimizer:
    def __init__(self):
        self.num_steps = 0

    def step(self):
        for hook in list(_before):  # noqa: PERF101 - a hook may remove itself
            hook(self, (), {})
        self.num_steps += 1
        for hook in list(_after):  # noqa: PERF101 - a hook may remove itself
            hook(self, (), {})
