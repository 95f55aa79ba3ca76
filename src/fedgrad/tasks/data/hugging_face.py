"""Data sets of Hugging Face, partitioned by Flower Datasets; the only file that imports either."""

import contextlib
from collections.abc import Iterator
from typing import Any

from fedgrad.core.errors import needs
from fedgrad.tasks.data.arrays import Arrays, Divide
from fedgrad.tasks.data.source import DataError, RawClient, Source, part_of


class Partitions(Source):
    """A source with `load_partition(i)`, such as a `flwr_datasets.FederatedDataset`."""

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data, name
        partitioners = getattr(data, "partitioners", None)
        with _reaching(name):
            if partitioners:
                data.load_partition(0)  # only then it knows the number of partitions
                self.total = int(next(iter(partitioners.values())).num_partitions)
            else:
                self.total = int(getattr(data, "num_partitions", 0)) or None
        if self.total is None:
            raise DataError.here(f"{name} does not say how many partitions it has.")

    def clients(self) -> Iterator[RawClient]:
        """Yield a client for each partition."""
        assert self.total is not None
        for i in range(self.total):
            with _reaching(self.name):
                rows = self.data.load_partition(i)
                columns = {name: list(rows[name]) for name in rows.column_names}
            yield RawClient(str(i), "", columns)


def by_column(name: str, column: str) -> Source:
    """Return a data set with a client for each value of a column."""
    with needs(f"The data set {name!r} of Hugging Face", "huggingface"):
        from flwr_datasets import FederatedDataset
        from flwr_datasets.partitioner import NaturalIdPartitioner
    partitioner = NaturalIdPartitioner(partition_by=column)
    return Partitions(FederatedDataset(dataset=name, partitioners={"train": partitioner}), name)


def divided(name: str, divide: Divide) -> Source:
    """Return a data set whose examples have no clients yet, divided by `divide`."""
    with needs(f"The data set {name!r} of Hugging Face", "huggingface"):
        from datasets import load_dataset
    with _reaching(name):
        found = load_dataset(name)
        parts = {
            part_of(part, name): {column: list(rows[column]) for column in rows.column_names}
            for part, rows in found.items()
        }
    return Arrays(parts, name, divide)


@contextlib.contextmanager
def _reaching(name: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # of the network, of the hub, of the file
        reason = str(error).partition("\n")[0]
        raise DataError.here(
            f"The data set {name!r} of Hugging Face cannot be had: {type(error).__name__}: {reason}"
        ) from error
