"""Callbacks that tell others: every round once and in order, under the names of the history."""

import contextlib
import csv
import itertools
import json
import sqlite3
import struct
import sys
import types

import jax
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.core.errors import MissingExtra
from fedgrad.training.files import RunFolderError
from fedgrad.training.logger import Logger
from line import FIRST, line, mean_square, points

CLIENTS = fg.population(points())
LINE = line()
RATES = np.array([0.05, 0.1])
PAIR = fg.side_by_side(LINE, {"rate": RATES, "noise": 0.0})


def train(algorithm=LINE, rounds=6, **more):
    settings = {"params": FIRST, "cohort_size": 5, "key": jax.random.key(3), "progress": False}
    return fg.fit(algorithm, CLIENTS, rounds=rounds, **settings, **more)


def evaluation(every):
    return fg.Evaluation(lambda p: {"w": np.float32(1.5)}, every=every)


class Noted(Logger):
    """What was told, in order."""

    def __init__(self):
        super().__init__()
        self.runs = []

    def open(self, about):
        self.runs.append((about, []))

    def write(self, round, values):
        self.runs[-1][1].append((round, dict(values)))

    def end(self):
        self.runs[-1][1].append("end")


def as_told(history):
    """A history as rows of numbers, without how long rounds took."""
    return [
        (row.pop("round"), {n: float(v) for n, v in row.items() if n != "seconds"})
        for row in history.rows()
    ]


def without_seconds(told):
    return [(r, {n: v for n, v in values.items() if n != "seconds"}) for r, values in told]


def test_a_logger_is_told_the_history():
    noted = Noted()
    result = train(callbacks=[noted], evaluate={"test": evaluation(4)})
    ((about, told),) = noted.runs
    assert told.pop() == "end" and without_seconds(told) == as_told(result.history)
    assert about["algorithm"]["name"] == "line_round" and about["hyper"]["rate"] == 0.1
    assert about["cohort_size"] == 5 and about["clients"] == 12 and about["rounds"] == 6


def test_a_run_that_is_resumed_is_told_from_the_start(tmp_path):
    noted = Noted()
    train(rounds=4, out=tmp_path, callbacks=[noted], evaluate=evaluation(3))
    result = train(rounds=9, out=tmp_path, callbacks=[noted], evaluate=evaluation(3))
    train(rounds=9, out=tmp_path, callbacks=[noted], evaluate=evaluation(3))  # nothing is left
    assert len(noted.runs) == 3
    for _, told in noted.runs[1:]:
        assert without_seconds(told[:-1]) == as_told(result.history)


def test_what_is_evaluated_because_training_stops_is_told():
    noted = Noted()
    third = fg.Stop("loss", lambda values: len(values) == 3)
    train(callbacks=[noted, third], evaluate=evaluation(5))
    told = noted.runs[0][1]
    assert told[-2:] == [(3, {"eval.w": 1.5}), "end"]


def test_a_histogram_of_clients_is_not_told_number_by_number():
    noted, each = Noted(), fg.Evaluation({"loss": mean_square}, CLIENTS, per_client=True)
    result = train(rounds=1, evaluate=each, callbacks=[noted])
    assert result.history["eval.per_client.loss.percentiles"].shape == (2, 100)
    _, told = noted.runs[0][1][0]
    parts = ("mean", "lowest_tenth", "highest_tenth")
    assert set(told) == {"eval.loss", *(f"eval.per_client.loss.{part}" for part in parts)}


def test_trials_side_by_side_have_a_number():
    noted = Noted()
    result = train(PAIR, rounds=2, callbacks=[noted])
    round, values = noted.runs[0][1][1]
    assert [values["loss/0"], values["loss/1"]] == result.history["loss"][1].tolist() and round == 2


# TensorBoard


def events(folder):
    """What TensorBoard shows: by (curve, round), the last file hides the rounds that it has."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = {}
    for file in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        content = file.read_bytes()
        while content:  # length, checksum, event, checksum
            (size,) = struct.unpack("<Q", content[:8])
            event, content = Event.FromString(content[12 : 12 + size]), content[16 + size :]
            if event.session_log.status == SessionLog.START:
                found = {key: v for key, v in found.items() if key[1] < event.step}
            found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
    return found


def test_what_tensorboard_reads(tmp_path):
    pytest.importorskip("tensorboardX")
    result = train(rounds=3, callbacks=[fg.TensorBoard(tmp_path)], evaluate=evaluation(2))
    found = events(tmp_path)
    assert [found["loss", round] for round in (1, 2, 3)] == result.history["loss"].tolist()
    assert found["eval/w", 2] == 1.5


def test_tensorboard_has_all_rounds_after_a_killed_run(tmp_path):
    """A killed process has not written its last rounds: here, none."""
    pytest.importorskip("tensorboardX")
    train(rounds=6, out=tmp_path / "run")
    result = train(rounds=9, out=tmp_path / "run", callbacks=[fg.TensorBoard(tmp_path / "board")])
    found = events(tmp_path / "board")
    assert [found["loss", r] for r in range(1, 10)] == result.history["loss"].tolist()


def test_tensorboard_is_flushed(monkeypatch, tmp_path):
    done = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            done.append(("open", folder, purge_step))

        def add_scalar(self, name, value, round):
            done.append((name, value, round))

        def flush(self):
            done.append("flush")

        def close(self):
            done.append("close")

    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    clock = itertools.count(0.0, 0.7)
    monkeypatch.setattr("fedgrad.training.tensorboard.time.monotonic", lambda: next(clock))
    result = train(rounds=4, callbacks=[fg.TensorBoard(tmp_path)])
    assert done[0] == ("open", str(tmp_path), 0) and done[-1] == "close"
    assert ("loss", float(result.history["loss"][1]), 2) in done
    assert done.count("flush") >= 1


# Weights & Biases, trackio


class FakeRun:
    def __init__(self, step=0):
        self.step, self.logged, self.finished = step, [], False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code=0):
        self.finished, self.exit_code = True, exit_code


def fake_wandb(step=0):
    module = types.SimpleNamespace(runs=[], asked=[])

    def init(**arguments):
        module.asked.append(arguments)
        module.runs.append(FakeRun(step))
        return module.runs[-1]

    module.init = init
    return module


def test_wandb(monkeypatch):
    module = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    watch = fg.WandB("digits", name="first", config={"mine": 1})
    result = train(callbacks=[watch], evaluate={"test": evaluation(3)})
    (asked,), (run,) = module.asked, module.runs
    assert asked["project"] == "digits" and asked["name"] == "first"
    assert asked["config"]["mine"] == 1 and asked["config"]["hyper"]["rate"] == 0.1
    assert without_seconds(run.logged) == as_told(result.history) and run.finished


class Trackio(FakeRun):
    def finish(self):
        self.finished = True


ENDS = {None: (0, "FINISHED"), ValueError: (1, "FAILED"), KeyboardInterrupt: (255, "KILLED")}


@pytest.mark.parametrize("error", ENDS)
def test_a_run_that_fails_has_failed_there_too(error, monkeypatch):
    module, mlflow, trackio = fake_wandb(), FakeMLflow(), Trackio()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    like_wandb = types.SimpleNamespace(init=lambda **_: trackio)

    def trip(round, state, metrics):
        if error is not None and round == 3:
            raise error

    watching = [fg.WandB("digits", module=module), fg.WandB("digits", module=like_wandb)]
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        train(callbacks=[*watching, fg.MLflow("digits"), trip])
    (run,) = module.runs
    assert (run.exit_code, mlflow.status) == ENDS[error]
    assert run.finished and trackio.finished and mlflow.ended == 1
    assert [step for step, _ in run.logged][-1] == (6 if error is None else 3)


def test_a_run_of_wandb_that_is_resumed_takes_no_step_twice(tmp_path):
    module = fake_wandb(step=7)  # rounds 1 to 6 are there
    train(rounds=4, out=tmp_path)
    train(rounds=9, out=tmp_path, callbacks=[fg.WandB("digits", module=module, id="first")])
    assert [step for step, _ in module.runs[0].logged] == [7, 8, 9]


@pytest.mark.filterwarnings("default")  # of others
def test_the_real_wandb(monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = train(callbacks=[fg.WandB("digits", dir=str(tmp_path))], evaluate=evaluation(3))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"eval.w" in content and b"line_round" in content
    assert all(str(float(loss)).encode() in content for loss in result.history["loss"])


@pytest.mark.filterwarnings("default")  # of others
def test_the_real_trackio(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio", reason="needs trackio")
    result = train(callbacks=[fg.WandB("digits", module=trackio, name="first")])
    with contextlib.closing(sqlite3.connect(tmp_path / "digits.db")) as file:
        found = file.execute("select step, metrics from metrics where run_name = 'first'")
        losses = {step: json.loads(metrics)["loss"] for step, metrics in found}
    assert losses == dict(enumerate(result.history["loss"].tolist(), 1))


# MLflow


class FakeMLflow(types.SimpleNamespace):
    def __init__(self, active=None, known={}, steps=()):
        client = types.SimpleNamespace(get_metric_history=self.metric_history)
        self.steps, self.MlflowClient = steps, lambda: client
        super().__init__(active=active, experiment=None, params=dict(known), metrics=[], ended=0)

    def metric_history(self, run_id, name):
        assert (run_id, name) == ("r1", "seconds")  # which every round has
        return [types.SimpleNamespace(step=step) for step in self.steps]

    def active_run(self):
        return self.active

    def set_experiment(self, name):
        self.experiment = name

    def start_run(self, **arguments):
        self.started = arguments
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

    def get_run(self, run_id):
        return types.SimpleNamespace(data=types.SimpleNamespace(params=dict(self.params)))

    def log_params(self, params):
        assert not set(params) & set(self.params), "a parameter cannot be changed"
        self.params |= params

    def log_metrics(self, metrics, step, run_id):
        self.metrics.append((step, metrics))
        assert run_id == "r1"

    def end_run(self, status="FINISHED"):
        self.ended, self.status = self.ended + 1, status


def test_mlflow(monkeypatch):
    module = FakeMLflow(known={"rounds": "3"})
    monkeypatch.setitem(sys.modules, "mlflow", module)
    result = train(callbacks=[fg.MLflow("digits", run_name="first")], evaluate=evaluation(3))
    assert module.experiment == "digits" and module.started == {"run_name": "first"}
    assert module.params["hyper.rate"] == 0.1 and module.params["rounds"] == "3"
    assert without_seconds(module.metrics) == as_told(result.history) and module.ended == 1


def test_a_run_of_mlflow_that_is_resumed_takes_no_step_twice(monkeypatch, tmp_path):
    module = FakeMLflow(steps=(1, 2, 3, 4, 5))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    train(rounds=4, out=tmp_path)
    train(rounds=9, out=tmp_path, callbacks=[fg.MLflow(run_id="r1")])
    assert [step for step, _ in module.metrics] == [6, 7, 8, 9]


def test_mlflow_leaves_the_users_run_open(monkeypatch):
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    module = FakeMLflow(active=run)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    odd = line(metrics=lambda m: fg.Metrics(m.loss, extra={"Prodigy, clients 1": m.loss}))
    train(odd, rounds=2, callbacks=[fg.MLflow("digits")])
    assert module.ended == 0 and module.experiment is None
    assert "Prodigy_ clients 1" in module.metrics[0][1]  # it takes no commas


@pytest.mark.filterwarnings("default")  # of others
def test_the_real_mlflow(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    train(rounds=4, out=tmp_path / "run", callbacks=[fg.MLflow("digits")])
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["hyper.rate"] == "0.1"
    again = fg.MLflow("digits", run_id=run.info.run_id)
    result = train(rounds=6, out=tmp_path / "run", callbacks=[again])
    found = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss")}
    assert found == dict(enumerate(result.history["loss"].tolist(), 1))


# CSV


def rows(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv(tmp_path):
    path = tmp_path / "deep" / "run.csv"
    stop = fg.Stop("loss", lambda values: len(values) == 5)
    result = train(rounds=9, callbacks=[fg.CSV(path), stop], evaluate=evaluation(3))
    found = rows(path)
    assert [row["round"] for row in found] == ["0", "1", "2", "3", "4", "5"]
    assert [float(row["loss"]) for row in found[1:]] == result.history["loss"].tolist()
    assert [row["eval.w"] for row in found] == ["1.5", "", "", "1.5", "", "1.5"]


def test_csv_of_a_run_that_is_resumed(tmp_path):
    watch = fg.CSV(tmp_path / "run.csv")
    train(PAIR, rounds=3, out=tmp_path / "run", callbacks=[watch])
    result = train(PAIR, rounds=5, out=tmp_path / "run", callbacks=[watch])
    found = rows(tmp_path / "run.csv")
    assert [float(row["loss/1"]) for row in found] == result.history["loss"][:, 1].tolist()


def test_a_table_that_cannot_be_written_is_known_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    never = lambda *_: pytest.fail("it trains")
    with pytest.raises(RunFolderError, match=r"Cannot write .*run.csv"):
        train(callbacks=[never, fg.CSV(tmp_path / "file" / "run.csv")])


# Extras

EXTRAS = {
    "tensorboard": ("tensorboardX", lambda: fg.TensorBoard("runs")),
    "wandb": ("wandb", lambda: fg.WandB("project")),
    "mlflow": ("mlflow", lambda: fg.MLflow()),
    "pandas": ("pandas", lambda: fg.History().to_pandas()),
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_needs_an_extra(extra, monkeypatch):
    module, make = EXTRAS[extra]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"fedgrad\[{extra}\]"):
        make()


def test_a_history_as_a_data_frame():
    pandas = pytest.importorskip("pandas")
    result = train(rounds=4, evaluate=evaluation(3))
    frame = result.history.to_pandas()
    assert frame.index.name == "round" and frame.index.tolist() == [0, 1, 2, 3, 4]
    assert frame["loss"].dropna().tolist() == result.history["loss"].tolist()
    assert frame["eval.w"].isna().tolist() == [False, True, True, False, False]
    assert set(fg.History().to_pandas().columns) == set()
    two = train(PAIR, rounds=2).history
    assert two.to_pandas()["loss/1"].tolist() == two["loss"][:, 1].tolist()
    assert isinstance(frame, pandas.DataFrame)
