"""Enters every Python that ``headrace run`` starts: starts the agent, then hands over to the user's own sitecustomize.

Standard library only, Python 3.10 to 3.14: headrace itself need not be installed where this runs. Nothing that goes
wrong in here may reach the user's program.
"""

import os
import sys


def _start():
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        run_dir = os.environ.get("HEADRACE_RUN_DIR")
        if run_dir and sys.version_info >= (3, 10):  # an older Python among the children of the program passes through
            import _headrace_agent

            _headrace_agent.start(run_dir)
    except BaseException:  # noqa: BLE001 - the border to the user's program: it must start whatever happened here
        pass
    finally:
        sys.path[:] = [p for p in sys.path if os.path.normpath(p) != here]


def _chain():
    # The import system finds the next one and puts it in our place. An error in it is the user's to see, so it passes
    # through; so does the ImportError when there is none, which site expects.
    del sys.modules["sitecustomize"]
    import sitecustomize  # type: ignore[import-not-found, unused-ignore]  # noqa: F401 - the user's, if any


_start()
_chain()
