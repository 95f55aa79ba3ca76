"""The mesh executor: 8 devices of one process, and 2 processes with 2 devices each.

A process has a fixed number of devices, so the work is done in processes of their own, which run
mesh_worker.py: the table of programs in every mode, and checks of which each is a test here.
"""

import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_derivatives import IMPOSSIBLE, assert_close, centralized

import fedgrad as fg
from fedgrad.execution import multi_process
from fedgrad.execution.devices import sum_over_devices
from programs import TABLE, assert_same, class_1
from where import ROOT, TESTS

WORKER, PAGE = TESTS / "mesh_worker.py", ROOT / "docs" / "mesh.md"
ALONE, FIRST, SECOND = "8 devices", "2 x 2 devices, first", "2 x 2 devices, second"
WORKERS = (ALONE, FIRST, SECOND)
SECONDS = 900  # long past any run, on a busy machine too; then something hangs
every_worker = pytest.mark.parametrize("worker", WORKERS)


def combinations():
    for case in TABLE:
        for mode in (None, "forward", "reverse", "mixed"):
            if (case.name, mode) not in IMPOSSIBLE and (mode or case.client_outputs):
                yield pytest.param(case, mode, id=f"{case.name}-{mode or 'value'}")


every_combination = pytest.mark.parametrize("case, mode", list(combinations()))


def clients_of(case):
    return (3, 8, 9)[TABLE.index(case) % 3]


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start(*arguments, log):
    command = [sys.executable, *map(str, arguments)]
    # On a busy machine one of eight devices may be late; XLA would end the process after 40 s.
    patient = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {patient}"}
    with open(log, "wb") as file:
        return subprocess.Popen(
            command, cwd=TESTS, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def finish(processes, logs):
    """Wait for all. If one fails, the others would wait for it: they are ended."""
    try:
        for process, log in zip(processes, logs, strict=True):
            code = process.wait(SECONDS)
            assert code == 0, Path(log).read_text(errors="replace")[-4000:]
    finally:
        for process in processes:
            process.kill()  # nothing, if it has ended
            process.wait()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What the workers found, by worker. They run at the same time."""
    folder = tmp_path_factory.mktemp("mesh")
    address = free_address()
    settings = {ALONE: (8,), FIRST: (2, 0, 2, address), SECOND: (2, 1, 2, address)}
    files = {worker: folder / f"{i}.pickle" for i, worker in enumerate(settings)}
    logs = {worker: folder / f"{i}.log" for i, worker in enumerate(settings)}
    processes = [
        start(WORKER, files[worker], *setting, log=logs[worker])
        for worker, setting in settings.items()
    ]
    finish(processes, logs.values())
    return {worker: pickle.loads(file.read_bytes()) for worker, file in files.items()}


# --- every program in every mode ----------------------------------------------------------------


@every_combination
@every_worker
def test_equals_centralized(reports, worker, case, mode):
    found, _, _ = reports[worker]["table"][case.name, mode]
    assert_close(found, centralized(case, clients_of(case), derived=mode is not None))


# In these XLA finds something more to save: sums of two placements that it can send together, a sum
# that is the same in two branches, and a sum of zeros (the derivative of a sign).
FEWER = {("parallel_placements", None), ("switch", "reverse")}
FEWER |= {("cond_with_dead_communication", "mixed")}


@every_combination
def test_one_all_reduce_for_each_message_and_nothing_else(reports, case, mode):
    _, messages, collectives = reports[ALONE]["table"][case.name, mode]
    if mode is None and clients_of(case) % 8:  # results that cannot be split evenly are collected
        assert collectives.pop("all-gather") <= len(case.client_outputs)
    assert messages >= 1
    if (case.name, None) in FEWER or (case.name, mode) in FEWER:
        assert list(collectives) == ["all-reduce"]
        assert 1 <= collectives["all-reduce"] <= messages
    else:
        assert collectives == {"all-reduce": messages}


# --- the checks of the workers ------------------------------------------------------------------

BOTH = [
    "any_number_of_clients",
    "clients_of_different_sizes",
    "derivatives_with_clients_of_different_sizes",
    "every_dtype_in_one_message",
    "examples_stay_on_their_device",
    "nobody_reads_bad_data_of_clients_who_take_no_part",
    "sampling_does_not_depend_on_where_the_examples_are",
    "state_stays_at_the_clients",
    "the_digest_does_not_depend_on_where_the_examples_are",
    "values_are_where_they_belong",
    "what_clients_keep_is_kept_wherever_they_are",
]
ONLY_ALONE = [
    "a_cohort_belongs_to_its_mesh",
    "every_kind_of_mesh_and_argument",
    "few_compilations",
    "jax_from_outside",
    "keys_numbers_and_constants_are_arguments_too",
    "local_deals_over_its_devices",
    "no_client_changes_its_device",
    "one_all_reduce_a_message_in_optimized_programs",
]
ONLY_TOGETHER = [
    "a_run_goes_on_from_one_folder",
    "training_runs_unchanged",
    "what_differs_between_processes_is_refused",
]
CHECKS = {ALONE: BOTH + ONLY_ALONE, FIRST: BOTH + ONLY_TOGETHER, SECOND: BOTH + ONLY_TOGETHER}


@pytest.mark.parametrize(
    "worker, name", [(worker, name) for worker, names in CHECKS.items() for name in names]
)
def test_check(reports, worker, name):
    problem = reports[worker]["checks"][name]
    assert not problem, problem


@every_worker
def test_no_check_is_forgotten(reports, worker):
    assert set(reports[worker]["checks"]) == set(CHECKS[worker])


# --- the page -----------------------------------------------------------------------------------


def test_the_script_of_the_page(tmp_path):
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script, address = tmp_path / "script.py", free_address()
    script.write_text(code)
    logs = [tmp_path / f"{i}.log" for i in range(2)]
    finish([start(script, i, address, log=log) for i, log in enumerate(logs)], logs)
    z = np.concatenate([np.random.default_rng(i).normal(size=(6, 3)) for i in range(2)])
    x, state = np.ones(3), 0.0
    for _ in range(3):
        state = state + x * z
        x = state.mean(0)
    for log in logs:
        # Gloo writes to the same place, also into the middle of a line.
        printed = re.sub(r"\[Gloo\][^\n]*\n", "", log.read_text(errors="replace"))
        (found,) = re.findall(r"mean \[(.*?)\] of 12 clients, of whom here 6", printed)
        np.testing.assert_allclose([float(word) for word in found.split()], x, rtol=1e-5)
        (found,) = re.findall(r"Population\(7 clients, 58 examples\) mean ([\d.]+)", printed)
        np.testing.assert_allclose(float(found), (14 * 1 + 44 * 2) / 58, rtol=1e-6)


def test_the_message_of_the_page(monkeypatch):
    monkeypatch.setattr(multi_process, "gather", lambda devices, x: np.stack([x, x + 1]))
    with pytest.raises(fg.ArgumentError) as caught:
        multi_process.require_equal(fg.executors.mesh().devices, {"x": [1.0]}, "accumulate")
    message = str(caught.value).partition(": ")[2]
    assert message in " ".join(PAGE.read_text().split())


# --- here, on one device ------------------------------------------------------------------------


def test_one_device_is_a_mesh_too():
    x, z = jnp.arange(1.0, 4.0), jnp.arange(12.0).reshape(4, 3)
    for chunk in (None, 3):
        assert_same(class_1.on(fg.executors.mesh(chunk=chunk))(x, z), class_1(x, z))


def test_an_executor_is_a_value():
    mesh = jax.make_mesh((1,), ("clients",))
    assert fg.executors.mesh(mesh) == fg.executors.mesh(mesh) != fg.executors.mesh()
    assert len({fg.executors.mesh(), fg.executors.mesh(), fg.executors.mesh(chunk=2)}) == 2


@pytest.mark.parametrize(
    "options, words",
    [
        ({"chunk": 0}, r"mesh\(chunk=0\): give a number of at least 1"),
        ({"mesh": 8}, r"mesh\(mesh=8\): give a jax\.sharding\.Mesh"),
        ({"axis": "client"}, r"mesh\(axis='client'\).*Did you mean 'clients'\? Known: clients, m"),
    ],
)
def test_wrong_options(options, words):
    if "axis" in options:
        options["mesh"] = jax.make_mesh((1, 1), ("clients", "model"))
    with pytest.raises(fg.ArgumentError, match=rf"{Path(__file__).name}:\d+: {words}"):
        fg.executors.mesh(**options)


NUMBERS = {
    "int32": np.array([[2**31 - 1, -(2**31), -1], [5, -7, 2**30]] * 4, np.int32),
    "uint32": np.array([2**32 - 1, 0, 1, 2**31, 7, 2**24 + 1, 2**16, 3], np.uint32),
    "int64": np.array([2**63 - 1, -(2**63), -1, 2**53 + 1, 3, -(2**40), 9, 1]),
    "uint64": np.array([2**64 - 1, 0, 5, 2**63, 7, 1, 2**54 + 1, 3], np.uint64),
    "float32": np.array([[1e30, 1.5], [-1e30, 2**-20]] * 4, np.float32),
    "float64": np.array([1e300, np.nan, np.inf, 1, 2, 3, 4, 5]),
    "complex64": (np.arange(8) * (1 - 2j)).astype(np.complex64),
    "complex128": np.arange(8) * (1 + 1e-9j),
}


@pytest.mark.parametrize(
    "names",
    [
        [*NUMBERS],
        ["int32", "float32"],
        ["int64", "uint32", "float32"],
        ["int64", "complex64"],
        ["int32", "uint32"],
        ["int32", "uint64"],
        ["float32", "float64"],
    ],
    ids=" ".join,
)
def test_a_message_of_mixed_dtypes_is_summed_exactly(names):
    """An axis of vmap stands for the devices; numpy wraps integers around as they should be."""
    values = [NUMBERS[name] for name in names]
    sums = jax.vmap(
        lambda *xs: sum_over_devices(list(xs), "devices", 8), axis_name="devices", out_axes=None
    )
    found = sums(*map(jnp.asarray, values))
    program = str(jax.make_jaxpr(sums)(*values))
    assert len(re.findall(r"= reduce_sum|= psum", program)) == 1
    for name, x, value in zip(names, found, values, strict=True):
        assert x.dtype == value.dtype == name
        with np.errstate(all="ignore"):
            wanted = value.sum(0, dtype=value.dtype)
        if np.issubdtype(value.dtype, np.integer):
            np.testing.assert_array_equal(x, wanted)
        else:
            np.testing.assert_allclose(x, wanted, rtol=1e-6 if "32" in name else 1e-15)
