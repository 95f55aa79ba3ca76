"""The examples of one client, where clients have different numbers of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.padding import MOST, padded
from fedgrad.clients.shuffle import permuted
from fedgrad.core.errors import ArgumentError, public, require_whole
from fedgrad.core.lossless import require_lossless
from fedgrad.core.types import Batch, Key

Carry = TypeVar("Carry")
NOWHERE = 2**31 - 1  # the index of an example that does not exist


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Part:
    """A part of a client's examples: from position `first` of a random order of all of them."""

    key: Key
    all: jax.Array  # the number of all examples of the client
    first: jax.Array
    rule: Any = field(metadata={"static": True})  # the rule that chose them
    held: bool = field(metadata={"static": True})  # held out, not for training


@public
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Examples:
    """One client's examples, as client code sees them: `count` of them, read by index.

    In simulation this is a view of a store that all clients share, so a client costs two integers;
    on a real node it is the node's own arrays.

    Attributes:
        store: Arrays with one row per example.
        offset: The first row of this client.
        count: The number of examples.
        capacity: The most examples that any client of the population has, a static bound on
            `count`.
        part: The part of the client's examples that these are, if not all (`fg.HeldOut`).
    """

    store: Any
    offset: jax.Array
    count: jax.Array
    capacity: int = field(metadata={"static": True})
    part: Part | None = None

    @classmethod
    def of(cls, arrays: Any) -> "Examples":
        """Return a client's own arrays (leaves with one row per example) as examples; examples are
        returned unchanged."""
        if isinstance(arrays, cls):
            return arrays
        require_lossless(arrays, "A client's examples")
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(arrays)]
        if len({shape[:1] for shape in shapes} - {()}) != 1 or () in shapes:
            raise ArgumentError.here(
                f"A client's examples are arrays with one row for each, got shapes {shapes}. Give "
                "all leaves the same number of rows."
            )
        count = shapes[0][0]
        store = jax.tree.map(lambda x: padded([jnp.asarray(x)], 2 * count), arrays)
        return cls(store, jnp.int32(0), jnp.int32(count), count)

    def take(self, indices: Any) -> Batch:
        """Return the examples at these indices. An index past the end gives the last example. A
        negative index is refused, or gives the first example if it is known only at run time."""
        rows = self.offset + self.index(indices)
        return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), self.store)

    def index(self, indices: Any) -> jax.Array:
        """Return the positions of these examples in the client's own data: the same indices, unless
        these are a part of the data (`fg.HeldOut`). With them, a client can keep a value for each
        example."""
        _require_places("indices", indices)
        places = jnp.clip(jnp.asarray(indices, jnp.int32), 0, self.count - 1)
        if self.part is None:
            return places
        return permuted(self.part.key, self.part.all, self.part.first + places)

    def batch(self, start: Any, size: int) -> tuple[Batch, jax.Array]:
        """Return examples start ... start + size - 1 and a mask of those that exist; the others
        repeat the last one. A negative start is refused, or means 0 if it is known only at run
        time."""
        _require_places("start", start)
        require_whole("size", size)
        start = jnp.maximum(jnp.asarray(start, jnp.int32), 0)
        places = start + jnp.arange(size, dtype=jnp.int32)
        # Positions far past the end may overflow.
        mask = (places >= 0) & (places < self.count)
        last = jnp.maximum(self.count - 1, 0)
        if size > self.capacity or self.part is not None:
            return self.take(jnp.where(mask, places, last)), mask

        def rows(leaf: jax.Array) -> jax.Array:
            # The store has `capacity` spare rows at its end, so that a slice is never shifted back.
            found = jax.lax.dynamic_slice_in_dim(leaf, self.offset + start, size)
            # Rows of a neighboring client may contain NaN, which a mask of the loss would not keep
            # out of its gradient.
            own = jnp.expand_dims(mask, range(1, leaf.ndim))
            return jnp.where(own, found, jax.lax.dynamic_slice_in_dim(leaf, self.offset + last, 1))

        return jax.tree.map(rows, self.store), mask

    def shuffled(self, key: Key, indices: Any = None) -> jax.Array:
        """Return these positions (by default all) of a random order of 0 ... count - 1, followed by
        the indices that do not exist. The cost is proportional to the number of positions."""
        if indices is not None:
            _require_places("indices", indices)
        places = jnp.arange(self.capacity) if indices is None else indices
        places = jnp.asarray(places, jnp.int32)
        return jnp.where(places < self.count, permuted(key, self.count, places), places)

    def fold(
        self,
        step: Callable[..., Carry],
        carry: Carry,
        batch_size: int,
        epochs: Any = 1,
        key: Key | None = None,
        steps: Any = None,
        most: int | None = None,
    ) -> Carry:
        """Run `carry = step(carry, batch, mask)` over this client's batches.

        A client with 53 examples and batches of 10 takes 6 steps, the last with a mask of 3. The
        loop is differentiable in every mode; where no reverse-mode derivative goes through it, the
        executor ends it after this client's last batch instead of the largest client's.

        Args:
            step: The step. If it has a fourth argument, `index`, it receives the positions of the
                examples in the client's own data; for examples that do not exist, a position past
                the end of any array, where `array.at[index].set(...)` has no effect.
            carry: The initial value.
            batch_size: The number of examples of a batch.
            epochs: The number of passes over the examples.
            key: Shuffles the examples; by default they are in data order.
            steps: The number of steps instead of `epochs`, the same for every client; batches
                repeat from the start when they run out (shuffled once).
            most: An upper bound on epochs or steps, where these are computed. More are not done:
                all floats of the result are NaN then.

        Returns:
            The final carry.
        """
        require_whole("batch_size", batch_size)
        for name, amount in (("epochs", epochs), ("steps", steps)):
            if isinstance(amount, int | float | np.number):
                require_whole(name, amount, least=0)
                if most is not None and amount > most:
                    raise ArgumentError.here(f"{name}={amount}, but most={most}. Raise `most`.")
        batches = -(-self.count // batch_size)
        whole = -(-self.capacity // batch_size)
        told = "index" in inspect.signature(step).parameters

        def take(i: jax.Array) -> tuple[Any, ...]:
            epoch, start = i // batches, i % batches * batch_size
            places = start + jnp.arange(batch_size, dtype=jnp.int32)
            mask = places < self.count
            if key is None:
                batch, _ = self.batch(start, batch_size)
            else:
                once = steps is not None or (most is None and epochs == 1)
                places = self.shuffled(key if once else jax.random.fold_in(key, epoch), places)
                batch = self.take(places)
            if not told:
                return batch, mask
            return batch, mask, jnp.where(mask, self.index(places), NOWHERE)

        def body(i: jax.Array, carry: Carry) -> Carry:
            return step(carry, *take(i))

        if most is None and steps is None:
            return repeat(body, carry, batches * epochs, whole * epochs)
        if most is None:
            return jax.lax.fori_loop(0, steps, body, carry)
        asked, room = (batches * epochs, whole * most) if steps is None else (steps, most)
        too_many = (epochs if steps is None else steps) > most
        done = repeat(body, carry, asked, room)
        return jax.tree.map(lambda leaf: _nan_where(too_many, leaf), done)


def _nan_where(wrong: jax.Array, leaf: Any) -> Any:
    floating = jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    return jnp.where(wrong, jnp.nan, leaf) if floating else leaf


def _require_places(name: str, places: Any) -> None:
    """Refuse a known negative index, which would be another client's example."""
    if isinstance(places, jax.core.Tracer):
        return
    require_lossless(places, name)
    least = np.min(np.asarray(places), initial=0)
    if least < 0:
        raise ArgumentError.here(
            f"{name}={least}: a client's examples are numbered from 0 on. Count from the "
            "end with count: examples.take(examples.count - 1)."
        )


def repeat(
    step: Callable[[jax.Array, Carry], Carry], carry: Carry, times: jax.Array, most: int
) -> Carry:
    """Run `for i in range(times): carry = step(i, carry)` with `times <= most`, differentiably.

    It is traced as a scan of static length whose steps past `times` do nothing. The local executor
    recognizes this form and runs it with a dynamic trip count (execution/ragged.py).
    """

    if most > MOST:
        raise ArgumentError.here(
            f"{most:,} steps of a client are more than 32 bits can count. Ask for fewer epochs."
        )
    times = jnp.asarray(times, jnp.int32)

    def body(state: tuple[jax.Array, Carry], _: None) -> tuple[tuple[jax.Array, Carry], None]:
        i, inner = state
        inner = jax.lax.cond(i < times, lambda c: step(i, c), lambda c: c, inner)
        return (i + 1, inner), None

    (_, carry), _ = jax.lax.scan(body, (jnp.int32(0), carry), None, length=most)
    return carry
