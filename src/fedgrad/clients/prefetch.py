"""Prefetch: load what is needed next in the background, while the devices work."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD = 2  # the number of rounds loaded in advance


class Prefetch(Generic[T]):
    """A function of 0, 1, 2 ..., mostly called in this order, whose values are computed in advance.

    One thread computes them, from the first call until `close`. It is never more than a few numbers
    ahead, nor beyond the `last` one; its errors are raised for the number that they concern.
    """

    def __init__(self, load: Callable[[int], T], last: int | None = None) -> None:
        self.load, self.last = load, last
        self.pool: ThreadPoolExecutor | None = None
        self.coming: dict[int, Future[T]] = {}

    def __call__(self, number: int) -> T:
        """Return the value, as soon as it is loaded."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, thread_name_prefix="fedgrad-prefetch")
        wanted = range(number, number + 1 + AHEAD)
        for other in [n for n in self.coming if n not in wanted]:
            self.coming.pop(other).cancel()
        for n in wanted:
            if n not in self.coming and (self.last is None or n <= self.last):
                self.coming[n] = self.pool.submit(self.load, n)
        return self.coming[number].result()

    def close(self) -> None:
        """Stop the thread, after its current item."""
        pool, self.pool, self.coming = self.pool, None, {}
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
