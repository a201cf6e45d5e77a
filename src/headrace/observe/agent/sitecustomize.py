"""Enters every Python that ``headrace run`` starts: starts the agent, then hands over to the user's own sitecustomize.

Standard library only, Python 3.10 to 3.14: headrace itself need not be installed where this runs. Nothing that goes
wrong in here may reach the user's program.
"""

import os
import sys


def _start():
    here = os.path.dirname(os.path.abspath(__file__))
    run_dir = os.environ.get("HEADRACE_RUN_DIR")
    try:
        if run_dir:
            import _headrace_agent

            _headrace_agent.start(run_dir)
    except BaseException:  # noqa: B036, BLE001 - the border to the user's program: it must start whatever happened here
        pass
    finally:
        sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != here]


def _chain():
    # An error in the user's sitecustomize is theirs to see, so it passes through.
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_start()
_chain()
