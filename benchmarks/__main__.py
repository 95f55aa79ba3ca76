"""All benchmarks, or some of them: `python -m benchmarks [SECTION ...] [--quick]`.

Results go to benchmarks/results/: results.json, which every run adds its sections to, results.md
and the figures, which are made from it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

import machine  # noqa: E402
import real_data  # noqa: E402
import report  # noqa: E402
from sections import SECTIONS  # noqa: E402


def main() -> None:
    """Run the sections one after another and write what they found."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("section", nargs="*", choices=[[], *SECTIONS], help="default: all")
    parser.add_argument("--quick", action="store_true", help="only see that everything works")
    parser.add_argument("--data-folder", help="real data of the paper's tasks, see real_data.py")
    options = parser.parse_args()
    real_data.use(options.data_folder)
    results = report.load()
    failed = []
    for name in options.section or SECTIONS:
        title, section = SECTIONS[name]
        print(f"\n== {title} ({name}) ==", flush=True)
        facts, start = machine.facts(), time.perf_counter()
        try:
            data = section.run(options.quick)
        except Exception as error:  # the other sections are worth having anyway
            print(f"[{name}] FAILED: {type(error).__name__}: {error}", flush=True)
            failed.append(name)
            continue
        results[name] = {
            "machine": facts,
            "load after": f"{os.getloadavg()[0]:.2f}",
            "quick": options.quick,
            "seconds": time.perf_counter() - start,
            "data": data,
        }
        report.save(results)
        print(f"\n{section.report(data)}\n\n[{name}] {results[name]['seconds']:.0f} s", flush=True)
    report.write(results, SECTIONS)
    print(f"\nWritten: {report.RESULTS / 'results.md'}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
