"""Real data for the paper's tasks, in the folder that `--data-folder` names; else what they
generate themselves."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "FEDGRAD_BENCHMARK_DATA"  # the folder, for the processes that sections start too
# By task: what its file may be called, TFF's own first.
FILES = {
    "emnist": ("emnist_all.sqlite.lzma", "femnist_62_by_writer.npz"),
    "cifar100": ("cifar100.sqlite.lzma", "cifar100_small.npz"),
    "shakespeare": ("shakespeare.sqlite.lzma", "shakespeare_roles.json.gz"),
    "stackoverflow_words": ("stackoverflow.sqlite.lzma", "stackexchange_sentences.jsonl.gz"),
    "stackoverflow_tags": ("stackoverflow.sqlite.lzma", "stackexchange_sentences.jsonl.gz"),
}


def use(folder: str | None) -> None:
    """Let `file` look into this folder, here and in processes that are started from here."""
    if folder is None:
        return
    if not Path(folder).is_dir():
        raise SystemExit(f"--data-folder {folder}: there is no such folder.")
    os.environ[VARIABLE] = str(Path(folder).resolve())


def file(task: str) -> str | None:
    """The file of a task, if there is one."""
    if VARIABLE not in os.environ:
        return None
    there = (Path(os.environ[VARIABLE]) / name for name in FILES[task])
    return next((str(path) for path in there if path.exists()), None)
