"""What docs/memory-and-compile-time.md shows: `python docs/results/compile-time/measure.py`.

Every number is of a process of its own. Times are CPU seconds, which other work on the machine
disturbs least; memory is the most that the process ever held.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

START = """
import json, resource, sys, time
import jax, jax.numpy as jnp, numpy as np
import fedgrad as fg

def tell(**found):
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"peak": usage.ru_maxrss * 1024, **found}))
"""
FIRST_ROUND = """
task = fg.tasks.task("shakespeare")
algorithm = fg.fed_avgm(task.loss, fg.local_training(1.0, batch_size=4))
if WHAT == "tuned":
    algorithm = fg.self_tuning(algorithm, ["server", "client.learning_rate"])
params = task.init(jax.random.key(0))
begin = time.process_time()
fg.fit(algorithm, task.train, params=params, rounds=1, cohort_size=10, key=jax.random.key(0),
       progress=False)
tell(first=time.process_time() - begin)
"""
CHUNK = """
features = 2000
data = [{"x": np.ones((20, features), np.float32), "y": np.ones(20, np.float32)} for _ in range(10)]
clients = fg.population(data * (COHORT // 10))
def loss(params, batch):
    return (jnp.tanh(batch["x"] @ params["w"]).sum(1) - batch["y"]) ** 2
algorithm = fg.fed_avg(loss, fg.local_training(0.001, batch_size=20))
algorithm = algorithm.on(fg.executors.local(chunk=CHUNK))
params = {"w": jnp.zeros((features, 100))}
fg.fit(algorithm, clients, params=params, rounds=2, cohort_size=COHORT, key=jax.random.key(0),
       progress=False)
tell()
"""
IDLE = "tell()"


def measure(code, cache=None, **names):
    """What a new process tells."""
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    if cache:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    command = [sys.executable, "-c", START + given + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main():
    with tempfile.TemporaryDirectory() as folder:
        compiled = {}
        for what in ("fixed", "tuned"):
            cache = Path(folder) / what
            cold, filled, warm = (
                measure(FIRST_ROUND, cache=where, WHAT=what) for where in (None, cache, cache)
            )
            size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
            compiled[what] = {"none": cold["first"], "filling": filled["first"],
                              "filled": warm["first"], "bytes": size}  # fmt: skip
    memory = {"idle": measure(IDLE)["peak"]}
    for cohort in (50, 200):
        for chunk in (None, 10, 50):
            memory[f"{cohort}/{chunk}"] = measure(CHUNK, COHORT=cohort, CHUNK=chunk)["peak"]
    about = {name: version(name) for name in ("jax", "jaxlib")} | {
        "python": platform.python_version()
    }
    found = {"compiled": compiled, "memory": memory, "versions": about, "cores": os.cpu_count()}
    text = json.dumps(found, indent=2) + "\n"
    Path(__file__).with_name("results.json").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
