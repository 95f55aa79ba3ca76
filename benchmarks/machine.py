"""What a benchmark's numbers were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path


def facts() -> dict[str, str]:
    """The machine, the versions, the moment, and how busy the machine was at that moment."""
    return {
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def describe() -> str:
    """The facts as lines of text, for a report."""
    return "\n".join(f"{name:8}{value}" for name, value in facts().items())


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    print(describe())
