"""The tasks, small enough that hundreds of runs fit into minutes: five kinds and three tables.

Real data are read by the library's own tasks; here their clients are capped and their models are
small.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedgrad as fg
from fedgrad_experiments.results import ExperimentError

Client = Mapping[str, np.ndarray]
MOST = 160  # training examples per client, for real data
WORDS = 32  # per example with tags
CONTEXT = 6  # characters before the next one
EMBEDDED, HIDDEN = 8, 64
# Word indices: the size of the vocabulary, the index of unknown words, and the first index that is
# a word. Only known words are predicted.
FREQUENT, UNKNOWN, WORD = 1000, 1, 4


@dataclass(frozen=True)
class Laptop:
    """A task at laptop scale: how to make it (from a file if it needs one), its number of rounds,
    and the clients per round."""

    make: Callable[..., fg.tasks.Task]
    rounds: int
    cohort_size: int
    files: tuple[str, ...] = ()  # prefixes of its file's name in the data folder

    def made(self, name: str, data: str | Path | None) -> fg.tasks.Task:
        """Make the task; with real data, from its file in this folder (or from this file)."""
        found = self.make(data=self.file(name, data)) if self.files else self.make()
        return replace(found, name=name)

    def file(self, name: str, data: str | Path | None) -> Path:
        """Return the path of its data."""
        folder = None if data is None else Path(data)
        if folder is not None and folder.is_file():
            return folder
        there = [] if folder is None else sorted(folder.glob("*"))
        for file in there:
            if file.name.startswith(self.files):
                return file
        wanted = " or ".join(f"{begin}*" for begin in self.files)
        where = f"there is no {wanted} in {folder}" if folder else "and no folder is given"
        raise ExperimentError.here(
            f"Task {name!r} reads real data, {where}: --task-option data=FOLDER, with a file "
            f"{wanted} in it."
        )


def synthetic() -> fg.tasks.Task:
    """Make Synthetic(1, 1), with at most 200 examples per client."""
    task = fg.tasks.task("synthetic")
    assert task.test is not None
    return replace(task, train=_capped(task.train, 180), test=_capped(task.test, 20))


def emnist(data: Any = None) -> fg.tasks.Task:
    """Make EMNIST with images of half the size, and one hidden layer."""
    task = fg.tasks.task("emnist", data=data)
    sizes = (14 * 14, HIDDEN, 62)
    return _as_classifier(task, _halved, lambda key: fg.tasks.classifier.random(key, sizes))


def cifar100(data: Any = None) -> fg.tasks.Task:
    """Make CIFAR-100 with standardized images of 8 x 8, and one hidden layer."""
    task = fg.tasks.task("cifar100", data=data)
    sizes = (8 * 8 * 3, HIDDEN, 100)
    return _as_classifier(task, _small, lambda key: fg.tasks.classifier.random(key, sizes))


def shakespeare(data: Any = None) -> fg.tasks.Task:
    """Make next-character prediction from the embedded previous characters, with one hidden
    layer."""
    task = fg.tasks.task("shakespeare", data=data)
    tokens = 1 + max(int(jnp.max(leaf)) for leaf in jax.tree.leaves(task.train.everyone.store))
    return _as_classifier(task, _what_is_next, partial(_language, tokens=tokens), _embedded)


def words(data: Any = None) -> fg.tasks.Task:
    """Make next-word prediction, for frequent words, from the embedded previous words, with one
    hidden layer."""
    task = fg.tasks.task("stackoverflow_words", data=data)

    def convert(client: Client) -> Client:
        x, y = (np.where(client[n] < FREQUENT, client[n], UNKNOWN) for n in ("x", "y"))
        return _what_is_next({"x": x, "y": np.where(y >= WORD, y, 0)})

    return _as_classifier(task, convert, partial(_language, tokens=FREQUENT), _embedded)


def tags(data: Any = None) -> fg.tasks.Task:
    """Make the library's logistic regression of 50 tags from 1,000 words, using only the first
    words of an example."""
    task = fg.tasks.task("stackoverflow_tags", data=data)
    assert task.test is not None

    def begin(client: Client) -> Client:
        return {"x": client["x"][:, :WORDS], "y": client["y"]}

    train, test = (_capped(clients, MOST, begin) for clients in (task.train, task.test))
    return replace(task, train=train, test=test, validation=None)


def table(load: str, scale: float) -> fg.tasks.Task:
    """Make softmax regression on a table of scikit-learn, split over ten clients. Columns have mean
    0 and standard deviation `scale`."""
    x, y = _loaded(load)
    x = scale * (x - x.mean(0)) / x.std(0)
    rng = np.random.default_rng(0)
    examples = {"x": x.astype(np.float32), "y": y.astype(np.int32)}
    parts = fg.tasks.split.dirichlet(y, 10, 1.0, rng, at_least=5)
    train, test = fg.tasks.split.hold_out(fg.tasks.split.divide(examples, parts), 1 / 3, rng)
    sizes = (x.shape[1], int(y.max()) + 1)
    return fg.tasks.Task(
        train=fg.population(train),
        test=fg.population(test),
        init=lambda key: fg.tasks.classifier.zeros(sizes),
        loss=fg.tasks.classifier.cross_entropy,
        metrics={"accuracy": fg.tasks.classifier.accuracy},
        defaults=fg.tasks.Defaults(cohort_size=5, batch_size=10),
    )


TABLES = {"cancer": "load_breast_cancer", "wine": "load_wine", "iris": "load_iris"}
SCALES = (0.02, 1.0, 50.0)
TASKS: Mapping[str, Laptop] = {
    "digits": Laptop(partial(fg.tasks.task, "digits"), 200, 20),
    "synthetic": Laptop(synthetic, 200, 10),
    "emnist": Laptop(emnist, 150, 10, ("femnist", "emnist")),
    "shakespeare": Laptop(shakespeare, 150, 10, ("shakespeare",)),
    "cifar100": Laptop(cifar100, 150, 10, ("cifar100",)),
    "words": Laptop(words, 150, 10, ("stackexchange", "stackoverflow")),
    "tags": Laptop(tags, 150, 10, ("stackexchange", "stackoverflow")),
    **{
        f"{name}_x{scale:g}": Laptop(partial(table, load, scale), 100, 5)
        for name, load in TABLES.items()
        for scale in SCALES
    },
}


def data_set(task: str) -> str:
    """Return the data set of a task: all scales of a table belong to one data set."""
    return task.partition("_x")[0]


def _loaded(load: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ExperimentError.here(
            f"The tables of scikit-learn need it ({error}): pip install 'fedgrad[tasks]'."
        ) from error
    x, y = getattr(datasets, load)(return_X_y=True)
    return x, y


def _as_classifier(
    task: fg.tasks.Task,
    convert: Callable[[Client], Client],
    init: Callable[[jax.Array], Any],
    seen: Callable[[Any, Any], tuple[Any, Any]] = lambda params, x: (params, x),
) -> fg.tasks.Task:
    """Return a task with the same clients and another model: layers, and a function that prepares
    their input."""

    def of(score: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], jax.Array]:
        def scored(params: Any, batch: Any) -> jax.Array:
            layers, x = seen(params, batch["x"])
            return score(layers, {"x": x, "y": batch["y"]})

        return scored

    assert task.test is not None
    return fg.tasks.Task(
        train=_capped(task.train, MOST, convert),
        test=_capped(task.test, MOST, convert),
        init=init,
        loss=of(fg.tasks.classifier.cross_entropy),
        metrics={"accuracy": of(fg.tasks.classifier.accuracy)},
        defaults=replace(task.defaults, batch_size=20),
        about=task.about,
    )


def _language(key: jax.Array, tokens: int) -> Any:
    first, rest = jax.random.split(key)
    table = 0.05 * jax.random.normal(first, (tokens, EMBEDDED), jnp.float32)
    sizes = (CONTEXT * EMBEDDED, HIDDEN, tokens)
    return {"embedding": table, "layers": fg.tasks.classifier.random(rest, sizes)}


def _embedded(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    rows = jnp.take(params["embedding"], x, axis=0, mode="clip")
    return params["layers"], rows.reshape(len(x), -1)


def _halved(client: Client) -> Client:
    """Halve images by averaging four pixels each, with ink 1 and paper 0."""
    x = 1 - client["x"].reshape(-1, 14, 2, 14, 2).astype(np.float32).mean((2, 4)) / 255
    return {"x": x.reshape(len(x), -1), "y": client["y"].astype(np.int32)}


def _small(client: Client) -> Client:
    """Average nine pixels each, and standardize each image to mean 0 and deviation 1."""
    x = client["x"].reshape(-1, 8, 3, 8, 3, 3).astype(np.float32).mean((2, 4)).reshape(-1, 192)
    x = (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-3)
    return {"x": x, "y": client["y"].astype(np.int32)}


def _what_is_next(client: Client) -> Client:
    """Return pairs of a context and the next token, for all positions of the texts that have one,
    in a fixed random order."""
    x, y = (client[name].astype(np.int32) for name in ("x", "y"))
    before = np.pad(x, ((0, 0), (CONTEXT - 1, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(before, CONTEXT, axis=1)
    there = np.argwhere(y != 0)
    piece, place = there[np.random.default_rng(0).permutation(len(there))].T
    return {"x": windows[piece, place], "y": y[piece, place]}


def _capped(
    clients: fg.Population, most: int, convert: Callable[[Client], Client] = lambda client: client
) -> fg.Population:
    """Return the same clients, converted, with at most `most` examples each; clients without
    examples are dropped."""
    everyone = clients.everyone
    store = {name: np.asarray(rows) for name, rows in everyone.store.items()}
    ends = zip(np.asarray(everyone.offset), np.asarray(everyone.count), strict=True)
    made = [convert({n: rows[o : o + count] for n, rows in store.items()}) for o, count in ends]
    return fg.population(
        [{n: rows[:most] for n, rows in one.items()} for one in made if len(one["y"])]
    )
