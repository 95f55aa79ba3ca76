"""Ctrl-C: the first one ends training, the second one does not end the saving of it."""

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self


class Interrupts:
    """While this is entered, a Ctrl-C that follows another one is answered, not obeyed; the third
    is obeyed. It works in the main thread, the only one that a Ctrl-C reaches."""

    def __init__(self) -> None:
        self.pressed = 0
        self.before: Any = None

    def __enter__(self) -> Self:
        found = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(found):
            self.before = found
            signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def survived(self) -> None:
        """Somebody caught the interrupt and training goes on: the next one is a first one."""
        self.pressed = 0

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.pressed += 1
        if self.pressed != 2:
            self.before(number, frame)
        else:
            print("Saving what there is; Ctrl-C again to give it up.", file=sys.stderr, flush=True)
