"""Ctrl-C and SIGTERM: the first one ends training, the second one does not end the saving of it."""

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self


def interrupted(error: BaseException) -> bool:
    """Whether somebody asked for this end: by Ctrl-C, or by SIGTERM."""
    return isinstance(error, KeyboardInterrupt | SystemExit)


class Interrupts:
    """While this is entered, an interrupt that follows another one is answered, not obeyed; the
    third is obeyed. It works in the main thread, the only one that a signal reaches.

    SIGTERM, by which machines are taken away, ends the process as `sys.exit(143)` does, unless the
    program has its own idea of it.
    """

    def __init__(self) -> None:
        self.pressed = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {
                number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
            }
            if callable(handlers[signal.SIGINT]):
                self._take(signal.SIGINT, handlers[signal.SIGINT])
            if handlers[signal.SIGTERM] is signal.SIG_DFL:
                self._take(signal.SIGTERM, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self.before.items():
            signal.signal(number, before)

    def survived(self) -> None:
        """Somebody caught the interrupt and training goes on: the next one is a first one."""
        self.pressed = 0

    def _take(self, number: int, before: Any) -> None:
        self.before[number] = before
        signal.signal(number, self._pressed)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        self.pressed += 1
        if self.pressed == 2:
            print("Saving what there is; Ctrl-C again to give it up.", file=sys.stderr, flush=True)
        elif number == signal.SIGTERM:
            sys.exit(128 + number)
        else:
            self.before[number](number, frame)
