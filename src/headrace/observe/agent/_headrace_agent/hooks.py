"""Puts hooks in when torch is imported, and takes them out again.

A hook is a function ``patch(module)`` for a module's name; it runs once, right after that module's own code. Modules
already imported are patched at once. Patched attributes are remembered with their originals, in ``_undo``.
"""

import sys

from . import state

_targets: dict[str, list] = {}  # module name -> list of patch functions
_undo: list[tuple] = []  # (owner, name, original or _MISSING, ours)
_callbacks: list = []  # other ways to unhook
_MISSING = object()
_finder = None
_loaded = False
#: File name of the functions that stand in for torch's. The warnings module passes over frames with these two words in
#: their name, so a warning with a stacklevel names the same line as without us, and the user's filters apply to it;
#: torch.compile passes over files with this beginning.
HIDDEN = "<frozen importlib._bootstrap> (headrace)"


def on_import(name):
    """Decorator: ``patch(module)`` runs after the module ``name`` was imported."""

    def register(patch):
        _targets.setdefault(name, []).append(patch)
        return patch

    return register


def replace(owner, name, make):
    """Sets ``owner.name = make(original)``; undone by ``uninstall``. AttributeError when there is no original."""
    own = vars(owner).get(name, _MISSING)
    original = getattr(owner, name)
    ours = make(original)
    if isinstance(ours, type(replace)) and ours is not original:
        ours.__code__ = ours.__code__.replace(co_filename=HIDDEN)
    setattr(owner, name, ours)
    _undo.append((owner, name, own, ours))


def _swap(pairs):
    """Puts the second of each pair in the place of the first, in every module that imported it (``torch.save``)."""
    new_by_id = {id(old): new for old, new in pairs}
    for module in list(sys.modules.values()) if pairs else ():
        if isinstance(module, type(sys)):
            names = object.__getattribute__(module, "__dict__")  # not vars(): it would wake a lazy module
            for name, value in list(names.items()):
                if id(value) in new_by_id:
                    names[name] = new_by_id[id(value)]


def _in_modules():
    return [(original, ours) for owner, _, original, ours in _undo if isinstance(owner, type(sys))]


def when_uninstalled(call):
    _callbacks.append(call)


class _Finder:
    """A meta path finder that lets the others find a module and has our patches run after it was executed."""

    def __init__(self):
        self._busy = set()

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            _load_patches()
        if name not in _targets or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._busy.discard(name)
        # A loader that is a class (built-in modules) serves everybody and is left alone.
        if spec is not None and hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, type):
            try:
                _wrap_loader(spec.loader, name)
            except Exception as error:  # noqa: BLE001 - the module must load all the same
                state.failed("import " + name, error)
        return spec

    def _ask_others(self, name, path, target):
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


def _wrap_loader(loader, name):
    # On the loader's instance and only until it has run: the module keeps the genuine loader in its spec.
    original = loader.exec_module

    def exec_module(module):
        try:
            del loader.exec_module
        except AttributeError:
            pass
        original(module)
        if getattr(module, "__name__", None) == name:
            _apply(name, module)

    loader.exec_module = exec_module


def _apply(name, module):
    for patch in _targets.get(name, ()):
        label = "%s.%s" % (name, patch.__name__)
        if state.writer is None or state.hooked.get(label) is True:
            continue
        try:
            state.announce()
            patch(module)
            state.hooked[label] = True
        except Exception as error:  # noqa: BLE001 - torch is strange here: go on with less, and say so
            state.hooked[label] = "%s: %s" % (type(error).__name__, error)
            state.failed(label, error)


def install():
    """Arms the hooks. Imports neither torch nor, before torch is imported, what only the hooks need."""
    global _finder, _loaded
    _loaded = False
    _finder = _Finder()
    sys.meta_path.insert(0, _finder)
    if "torch" in sys.modules or state.data_spec:
        _load_patches()


@state.quiet("install")
def _load_patches():
    global _loaded
    if _loaded:
        return
    _loaded = True
    from . import calls, device, loaders, steps  # noqa: F401 - they register themselves

    if state.data_spec:
        calls.arm(state.data_spec)
    for name in list(_targets):
        module = sys.modules.get(name)
        if module is not None:
            _apply(name, module)
    _swap(_in_modules())


def uninstall():
    """Restores every attribute that is still ours."""
    global _finder
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _finder = None
    from . import stacks

    stacks.shut()
    while _callbacks:
        try:
            _callbacks.pop()()
        except Exception as error:  # noqa: BLE001
            state.failed("unhook", error)
    _swap([(ours, original) for original, ours in _in_modules()])
    while _undo:
        owner, name, original, ours = _undo.pop()
        if vars(owner).get(name) is not ours:
            continue  # somebody patched over us: their wrapper holds ours, which does nothing once there is no writer
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    state.hooked.clear()
