"""Ctrl-C and SIGTERM: the first stops training; a second one does not interrupt the final save."""

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self


def interrupted(error: BaseException) -> bool:
    """Return whether an exception comes from Ctrl-C or SIGTERM."""
    return isinstance(error, KeyboardInterrupt | SystemExit)


class Interrupts:
    """A context in which the second interrupt only prints a message, and the third one is obeyed.

    It works in the main thread, the only one that receives signals. SIGTERM, which preempted
    machines receive, exits like `sys.exit(143)`, unless the program has its own handler.
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
        """Reset the count: the interrupt was caught and training continues."""
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
