"""Runs a piece of work that may hang or spin, and says so."""

import threading
import time


def within(limit_s, work):
    """What ``work`` returns, made in a thread that is left behind when it does not end, or spins."""
    found = []

    def run():
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    began_s = time.process_time()
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), "it hangs"
    assert time.process_time() - began_s < limit_s / 4, "it spins"
    result, error = found.pop()
    if error is not None:
        raise error
    return result
