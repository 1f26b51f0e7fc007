"""Runs that are killed, stopped, damaged or fed nonsense: what is left, and what goes on from it."""

import csv
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest
from conftest import free_port

import checkpoints
from checkpoints.lock import RunLock

ROOT = Path(__file__).resolve().parent.parent


def call(out: Path, tokens: Path, **options: object) -> list[str]:
    named = {
        "data.path": tokens, "data.sequence_length": 64, "data.global_batch_size": 4, "out": out, "steps": 9,
        "log.samples_every": -1, "log.every": 1, "validate.every": 0, "checkpoints.every": 3,
        "checkpoints.keep_last": 1,
    } | options  # fmt: skip
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def newest(out: Path) -> dict[str, str]:
    return jobs.digest_of(str(checkpoints.latest(out / "checkpoints")))


@pytest.fixture(scope="module")
def undisturbed(group, tokens, tmp_path_factory) -> dict[str, str]:
    """Digests of every tensor, both moments and the position after 9 steps that nothing disturbed."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    group.run(1, jobs.training, call(out, tokens))
    digests = newest(out)
    assert digests["step"] == "9" and sum("exp_avg_sq" in key for key in digests) > 10
    return digests


POINTS = [
    "before the first byte", "in a shard", "before .metadata", "after .metadata", "in meta.pt", "before the manifest",
    "before the rename", "after the rename", "in retention",
]  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_each_point_of_a_save(forker, tokens, undisturbed, tmp_path, point):
    """The run goes on by itself and ends as the undisturbed one, to the last bit; nothing of the dead save is left."""
    out = tmp_path / "run"
    arguments = call(out, tokens)
    assert forker.run(1, jobs.fork_and_train, arguments, point) == [-signal.SIGKILL]
    steps = [step for step, _ in checkpoints.steps(out / "checkpoints")]
    assert steps == {"after the rename": [3, 6], "in retention": [6]}.get(point, [3])
    assert forker.run(1, jobs.fork_and_train, arguments) == [0]
    assert newest(out) == undisturbed
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000009"]
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
    with (out / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(step) for step in range(1, 10)]


@pytest.mark.parametrize("damage", ["flip", "zero", "cut", "empty", "missing"])
@pytest.mark.parametrize("kind", ["*.distcp", "meta.pt", ".metadata", "manifest.json"])
def test_a_damaged_newest_checkpoint_is_passed_over(group, tokens, undisturbed, tmp_path, kind, damage, half_way):
    """With a line that names the file; the run then ends as the undisturbed one. Named explicitly it is refused."""
    out = tmp_path / "run"
    shutil.copytree(half_way, out)
    path = out / "checkpoints" / "step-00000006"
    file = next(path.glob(kind))
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 3] ^= 4
    elif damage == "zero":
        content[: 4096 if len(content) > 9000 else 40] = bytes(4096 if len(content) > 9000 else 40)
    elif damage == "cut":
        del content[-1 if kind != "manifest.json" else -2 :]
    file.unlink()
    if damage != "missing":
        file.write_bytes(b"" if damage == "empty" else content)
    explicit = call(tmp_path / "other", tokens, resume=path)
    code, said = group.run(1, jobs.refused, explicit)[0]
    assert code == 2 and ("is damaged" in said or "is missing" in said or "not a complete checkpoint" in said)
    first = group.run(1, jobs.received, call(out, tokens))[0]
    assert len(first) == 4 * 6  # steps 4 to 9 again
    assert newest(out) == undisturbed
    assert [p.name for p in sorted((out / "checkpoints").glob("step-*"))] == ["step-00000009"]


@pytest.fixture(scope="module")
def half_way(group, tokens, tmp_path_factory) -> Path:
    """A run of 6 steps with checkpoints of steps 3 and 6."""
    out = tmp_path_factory.mktemp("half") / "run"
    options = {"steps": 6, "checkpoints.keep_last": 2, "optimizer.decay_steps": 9}
    group.run(1, jobs.training, call(out, tokens, **options))
    assert [step for step, _ in checkpoints.steps(out / "checkpoints")] == [3, 6]
    return out


def test_all_checkpoints_damaged(group, tokens, half_way, tmp_path):
    """Never a silent fresh start."""
    shutil.copytree(half_way, tmp_path / "run")
    for file in (tmp_path / "run").rglob("*.distcp"):
        file.write_bytes(b"")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    code, said = group.run(1, jobs.refused, call(tmp_path / "run", tokens))[0]
    assert code == 2 and "none of the 2 checkpoints" in said and "has 0 bytes" in said
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_names_that_are_none(half_way, tmp_path):
    """`step-5.bak`, a folder without a manifest, and step 900 beside step 1000."""
    folder = tmp_path / "checkpoints"
    for name in ("step-00000900", "step-00001000", "step-100000000"):
        shutil.copytree(half_way / "checkpoints" / "step-00000003", folder / name)
    shutil.copytree(half_way / "checkpoints" / "step-00000006", folder / "step-5.bak")
    (folder / "step-00002000").mkdir()
    assert [step for step, _ in checkpoints.steps(folder)] == [900, 1000, 100_000_000]
    assert checkpoints.latest(folder).name == "step-100000000"


def test_saves_that_fail(group, tmp_path):
    """One clear error on every rank, nothing of the failed save left, the earlier one untouched, the next one good."""
    found = group.run(4, jobs.saves_that_fail, str(tmp_path / "checkpoints"))
    for answer in found[1:]:
        assert answer == found[0]
    answer = found[0]
    first = ["step-00000000"]
    assert answer["step 0"].endswith("step-00000000") and answer["moments after step 0"] == 0
    assert answer["full on rank 2"].startswith("OSError: the checkpoint of step 1 could not be written")
    assert "rank 2: " in answer["full on rank 2"]  # torch's own words differ by version
    assert "rank 0: [Errno 28] No space left on device" in answer["full for meta.pt"]
    assert answer["not plain"] == "TypeError: progress['loss'] is a numpy.float64; save plain values"
    for name in ("full on rank 2", "full for meta.pt", "not plain"):
        assert answer[f"files after {name}"] == first, name
    assert answer["freed"].endswith("step-00000001")
    assert "norm.weight is not finite" in answer["not finite"]
    assert answer["files after not finite"] == [*first, "step-00000001"]
    for name in (*first, "step-00000001"):
        checkpoints.verify(tmp_path / "checkpoints" / name)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_gradient_that_is_not_finite_changes_nothing(group, tokens, tmp_path, rank):
    """On all ranks, whoever finds it: weights and moments stay as they were, bit by bit; the next step counts again."""
    options = {"steps": 5, "log.every": 5}
    found = group.run(4, jobs.bad_gradients, call(tmp_path / "bad", tokens, **options), rank, [3])
    for answer in found:
        digests = answer["digests"]
        assert len(digests) == 5 and digests[2] == digests[1] and len(set(digests)) == 4
        assert answer["code"] == 0
    assert "step 3: the gradient is not finite; skipped, samples 8 to 11" in found[0]["said"]
    good = group.run(4, jobs.bad_gradients, call(tmp_path / "good", tokens, **options), rank, [])
    assert [a["digests"][:2] for a in good] == [a["digests"][:2] for a in found]
    checkpoints.verify(checkpoints.latest(tmp_path / "bad" / "checkpoints"))


def test_too_many_bad_steps_end_the_run(group, tokens, tmp_path):
    options = {"steps": 9, "log.every": 2, "optimizer.max_skipped": 3, "checkpoints.every": 2}
    found = group.run(2, jobs.bad_gradients, call(tmp_path / "run", tokens, **options), 1, [4, 5, 6, 7, 8, 9])
    assert [answer["code"] for answer in found] == [1, 1]
    assert "not finite in 3 steps in a row, up to step 6" in found[0]["said"]
    assert "Traceback" not in found[0]["said"]
    assert [step for step, _ in checkpoints.steps(tmp_path / "run" / "checkpoints")] == [4]
    assert not (tmp_path / "run" / ".lock").exists()


def test_one_run_one_folder(tmp_path):
    """A second run is refused with the owner's name; a dead owner's lock is taken over, on this host and, by its
    silence, on another."""
    lock = RunLock(tmp_path)
    with pytest.raises(ValueError, match=rf"in use by run {lock.owner['run']} \(process {os.getpid()} on "):
        RunLock(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / ".lock"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = {"host": socket.gethostname(), "run": "x"}
    for owner, seconds, taken in (
        ({**here, "pid": dead.pid, "began": "1"}, 0, True),
        ({**here, "pid": os.getpid(), "began": "1"}, 0, True),  # another process of the same number
        ({"host": "elsewhere", "pid": 1, "run": "x"}, 10, False),
        ({"host": "elsewhere", "pid": 1, "run": "x"}, 1000, True),
        ("junk", 1000, True),
    ):
        path.write_text(json.dumps(owner))
        os.utime(path, (time.time() - seconds,) * 2)
        if taken:
            RunLock(tmp_path).release()
            assert not path.exists()
        else:
            with pytest.raises(ValueError, match=r"run x \(process 1 on elsewhere"):
                RunLock(tmp_path)
            path.unlink()


def wait_for(condition, seconds: float, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("to", ["the launcher", "rank 1"])
def test_sigterm_saves_and_leaves(group, tokens, tmp_path, to):
    """All ranks save at the end of the same step and leave; the run that goes on ends as an undisturbed one. A second
    run in the folder meanwhile is refused."""
    out, log = tmp_path / "run", tmp_path / "log"
    arguments = call(out, tokens, steps=4000, **{"optimizer.decay_steps": 100, "checkpoints.every": 0})
    fabric = [str(Path(sys.executable).with_name("fabric")), "run", "fabric_train.py", "--devices", "2"]
    port = ["--main-port", str(free_port())]
    with log.open("w") as file:
        process = subprocess.Popen([*fabric, *port, "--", *arguments], cwd=ROOT, stdout=file, stderr=file)
    metrics = out / "metrics.csv"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, 60, process, log)
    workers = children(process.pid)
    assert len(workers) == 2
    code, said = group.run(1, jobs.refused, call(out, tokens))[0]
    assert code == 2 and "is in use by run" in said
    ranks = {Path(f"/proc/{pid}/environ").read_bytes().split(b"\0RANK=")[1].split(b"\0")[0]: pid for pid in workers}
    os.kill(process.pid if to == "the launcher" else ranks[b"1"], signal.SIGTERM)
    process.wait(60)
    time.sleep(0.2)
    assert not [pid for pid in workers if alive(pid)], log.read_text()
    assert "Stopped (" in log.read_text() and "Traceback" not in log.read_text().split("Stopped (")[0]
    step = checkpoints.steps(out / "checkpoints")[-1][0]
    status = json.loads((out / "status.json").read_text())
    assert status == {"step": step, "steps": 4000, "finished": False}
    further = step + 3
    rest = {"steps": further, "optimizer.decay_steps": 100, "checkpoints.every": 0}
    group.run(2, jobs.received, call(out, tokens, **rest))
    group.run(2, jobs.received, call(tmp_path / "whole", tokens, **rest))
    assert newest(out) == newest(tmp_path / "whole")


def test_the_time_that_was_given(group, tokens, tmp_path):
    """Saved and left before it is over, and the same command goes on."""
    out = tmp_path / "run"
    arguments = [sys.executable, "fabric_train.py", *call(out, tokens, steps=10**6, max_minutes=0.3)]
    started = time.monotonic()
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - started < 18 and done.returncode == 0, done.stderr
    step = checkpoints.steps(out / "checkpoints")[-1][0]
    assert f"Stopped (--max_minutes) after step {step} of 1000000, saved." in done.stdout
    assert json.loads((out / "status.json").read_text())["finished"] is False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stuck_rank_ends_the_run(tokens, tmp_path):
    """SIGSTOP of one rank: the collective time-out reaches the mesh's groups, and every process ends."""
    out, log = tmp_path / "run", tmp_path / "log"
    arguments = call(out, tokens, steps=4000, **{"parallel.timeout_seconds": 8, "checkpoints.every": 0})
    port = ["--main-port", str(free_port())]
    fabric = [str(Path(sys.executable).with_name("fabric")), "run", "fabric_train.py", "--devices", "2"]
    with log.open("w") as file:
        process = subprocess.Popen([*fabric, *port, "--", *arguments], cwd=ROOT, stdout=file, stderr=file)
    metrics = out / "metrics.csv"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 60, process, log)
    workers = children(process.pid)
    stopped = next(pid for pid in workers if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(stopped, signal.SIGSTOP)
    started = time.monotonic()
    process.wait(60)
    assert process.returncode != 0 and time.monotonic() - started < 60
    time.sleep(0.2)
    assert not [pid for pid in workers if alive(pid)]


@pytest.mark.parametrize("option", ["out", "resume", "init_from"])
def test_remote_folders_are_refused(group, tokens, tmp_path, option, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = jobs.refused([*call(tmp_path / "run", tokens), f"--{option}", "s3://bucket/run"])
    assert code == 2 and "remote folders are not supported" in said
    assert not list(tmp_path.iterdir())


def test_one_file_killed_resumed_and_exported(forker, tokens, undisturbed, tmp_path):
    """Complete or absent; the run ends as the undisturbed one; other tools read it as they read shards."""
    from checkpoints.convert import CheckpointWeights

    out = tmp_path / "run"
    arguments = call(out, tokens, **{"checkpoints.distributed": False})
    assert forker.run(1, jobs.fork_and_train, arguments, "in meta.pt") == [-signal.SIGKILL]
    assert [step for step, _ in checkpoints.steps(out / "checkpoints")] == [3]
    assert forker.run(1, jobs.fork_and_train, arguments) == [0]
    path = checkpoints.latest(out / "checkpoints")
    digests = jobs.digest_of(str(path))
    common = undisturbed.keys() & digests.keys()
    assert sum(".exp_avg" in key for key in common) > 20
    assert {key: digests[key] for key in common} == {key: undisturbed[key] for key in common}
    weights = CheckpointWeights(path)
    assert weights.config.parameters == sum(weights.read(name).numel() for name in weights._stored)


MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 1)]


@pytest.mark.parametrize("saved", MESHES)
def test_one_file_holds_what_the_shards_hold_on_every_mesh(group, tokens, tmp_path, saved):
    """Both forms of a checkpoint, of 2 steps of one mesh, resumed on each other mesh for no step that changes anything:
    every tensor, both moments and the position are bit-equal in what that mesh saves. Shards and one file alike."""
    data, tensor = saved
    options = {"data.global_batch_size": 12, "parallel.tensor": tensor, "optimizer.decay_steps": 9, "log.every": 3}
    expected = None
    for distributed in (True, False):
        out = tmp_path / f"{distributed}"
        first = options | {"steps": 2, "checkpoints.distributed": distributed}
        group.run(data * tensor, jobs.training, call(out, tokens, **first))
        path = checkpoints.latest(out / "checkpoints")
        assert (path / "checkpoint.pt").exists() is not distributed
        digests = jobs.digest_of(str(path))
        shapes = {key: value for key, value in digests.items() if not key.startswith("optimizer.param_groups")}
        expected = expected or shapes
        assert shapes == expected
    other = MESHES[(MESHES.index(saved) + 1) % len(MESHES)]
    found = group.run(math.prod(other), jobs.loaded_and_saved, other, str(path), str(tmp_path / "again"))
    assert found == [None] * math.prod(other)
    again = jobs.digest_of(str(tmp_path / "again" / "step-00000002"))
    assert {key: again.get(key) for key in expected} == expected
