"""Ctrl-C ends a run after its step, with a save."""

import signal
import sys


class Interrupt:
    """First Ctrl-C: finish the step and save. Second: stop at once."""

    def __init__(self):
        self.asked = False

    def __enter__(self):
        def handle(signum, frame):
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            print("\nstopping after this step; Ctrl-C again stops at once", file=sys.stderr)

        try:
            self._old = signal.signal(signal.SIGINT, handle)
        except ValueError:  # not the main thread: nothing to catch
            self._old = None
        return self

    def __exit__(self, *_):
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)
