"""The program as a person starts it: python, torchrun, fabric run, a debugger."""

import csv
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest
from conftest import free_port
from test_mesh import train_arguments

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
SHORT = {"steps": 3, "checkpoints.every": 2, "validate.every": 2, "log.samples_every": 0}


def call(*command, code=0, seconds=180, text=None) -> str:
    """Run a command from the repository and return what it wrote; its process group must be gone afterwards."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output, _ = process.communicate(text, timeout=seconds)
    assert process.returncode == code, output
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return output


def rows(out) -> list[dict]:
    with (out / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_help_is_quick():
    started = time.perf_counter()
    text = call(sys.executable, "fabric_train.py", "--help")
    assert time.perf_counter() - started < 5
    for option in ("--model", "--optimizer.lr", "--parallel.tensor", "--checkpoints.every", "--config"):
        assert option in text


def test_printed_config_is_a_recipe(tmp_path):
    printed = call(sys.executable, "fabric_train.py", "--optimizer.lr", "0.5", "--print_config")
    (tmp_path / "recipe.yaml").write_text(printed)
    again = call(sys.executable, "fabric_train.py", "--config", tmp_path / "recipe.yaml", "--print_config")
    assert again == printed and "lr: 0.5" in printed
    overridden = call(
        sys.executable,
        "fabric_train.py",
        "--config",
        tmp_path / "recipe.yaml",
        "--optimizer.lr",
        "0.25",
        "--print_config",
    )
    assert "lr: 0.25" in overridden


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_parse(recipe):
    printed = call(sys.executable, "fabric_train.py", "--config", recipe, "--print_config")
    assert "model:" in printed


def test_one_process_then_again_then_further(tokens, tmp_path):
    """python fabric_train.py starts no child; a second call says how to go on; --steps goes on."""
    out = tmp_path / "run"
    arguments = train_arguments(out, tokens, **SHORT)
    childless = (
        "import subprocess, sys, os, fabric_train\n"
        "def no(*a, **k): raise AssertionError('a child process was started')\n"
        "subprocess.Popen = os.fork = os.posix_spawn = no\n"
        "fabric_train.main(sys.argv[1:])\n"
    )
    first = call(sys.executable, "-c", childless, *arguments)
    assert "475,776 parameters, 32-true on cpu" in first and "data-parallel 1 x tensor-parallel 1" in first
    assert re.search(
        r"step 3/3  loss \d\.\d{4}  grad norm \d+\.\d{3}  lr 1.00e-03  [\d,]+ tokens/s  data wait \d+\.\d%  "
        r"ETA 0:00:00",
        first,
    )
    assert "The model goes on from" in first
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "## Step 3" in (out / "samples.md").read_text()
    assert "steps: 3" in (out / "config.yaml").read_text()
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step-00000002", "step-00000003"]
    assert [row["validation_loss"] != "" for row in rows(out)] == [False, True, True]

    second = call(sys.executable, "fabric_train.py", *arguments)
    assert "has already reached step 3 of 3" in second
    for way in ("--steps", "--out", "--resume never"):
        assert way in second

    refused = call(sys.executable, "fabric_train.py", *arguments, "--resume", "never", code=2)
    assert "is in use" in refused and "Traceback" not in refused

    further = call(sys.executable, "fabric_train.py", *arguments, "--steps", "5")
    assert "resumed from" in further
    assert [row["step"] for row in rows(out)] == ["1", "2", "3", "4", "5"]
    assert [row["tokens"] for row in rows(out)] == [str(8 * 64 * step) for step in range(1, 6)]


def test_default_run_learns_real_text(group, tmp_path):
    """No option but the mesh (the numbers are the same on each): from what the initialisation implies to below 2.3."""
    out = tmp_path / "run"
    results = group.run(2, jobs.training, ["--parallel.tensor", "1", "--out", str(out)])
    losses = [float(row["loss"]) for row in results[0]["rows"]]
    assert losses[0] == pytest.approx(math.log(320) + 0.9733 / 2, abs=0.1)
    assert losses[-1] < 2.3
    held_out = [float(row["validation_loss"]) for row in results[0]["rows"] if row["validation_loss"]]
    assert held_out[-1] < held_out[0] < 3.5
    assert "## Step 100" in (out / "samples.md").read_text() and (out / "loss.png").stat().st_size > 10_000


def test_torchrun(tokens, tmp_path):
    arguments = train_arguments(tmp_path / "run", tokens, **SHORT | {"log.samples_every": -1})
    text = call(BIN / "torchrun", "--nproc-per-node", 2, "--master-port", free_port(), "fabric_train.py", *arguments)
    assert "data-parallel 1 x tensor-parallel 2" in text
    assert [row["step"] for row in rows(tmp_path / "run")] == ["1", "2", "3"]


def test_fabric_run(tokens, tmp_path):
    arguments = train_arguments(tmp_path / "run", tokens, **SHORT | {"log.samples_every": -1})
    command = [BIN / "fabric", "run", "fabric_train.py", "--devices", 4, "--main-port", free_port()]
    text = call(*command, "--", *arguments)
    assert "data-parallel 2 x tensor-parallel 2" in text
    again = call(*command, *arguments, "--precision", "32-true", "--steps", 4)  # without the dashes too
    assert "resumed from" in again
    assert [row["step"] for row in rows(tmp_path / "run")] == ["1", "2", "3", "4"]


def test_bad_call_under_fabric_run_says_it_once(tmp_path):
    command = [BIN / "fabric", "run", "fabric_train.py", "--devices", 4, "--main-port", free_port()]
    text = call(*command, "--parallel.data", "3", "--out", tmp_path / "run", code=1)  # torchrun's own code
    assert text.count("error: data-parallel size 3") == 1
    assert re.search(r"rank +: 0 .*\n +exitcode +: 2 ", text)


def test_debugger_sees_plain_values(tokens, tmp_path):
    """Breakpoints in a block's forward and in the loop, in one process."""

    def line(file: str, code: str) -> int:
        return 1 + next(i for i, text in enumerate((ROOT / file).read_text().splitlines()) if code in text)

    commands = [
        f"b llama/model.py:{line('llama/model.py', 'return x + self.feed_forward')}",
        f"b fabric_train.py:{line('fabric_train.py', 'lr = set_learning_rate(')}",
        "c",
        "p ('block', type(x).__name__, tuple(x.shape), type(self.attention.wq.weight).__name__)",
        "cl 1",
        "c",
        "p ('loop', step, type(losses).__name__, round(losses.mean().item(), 1))",
        "p (type(logits).__name__, tuple(logits.shape))",
        "cl 2",
        "c",
        "q",
    ]
    arguments = train_arguments(tmp_path / "run", tokens, **SHORT)
    text = call(sys.executable, "-m", "pdb", "fabric_train.py", *arguments, text="\n".join(commands) + "\n")
    assert "('block', 'Tensor', (8, 64, 128), 'Parameter')" in text
    assert re.search(r"\('loop', 1, 'Tensor', \d\.\d\)", text) and "('Tensor', (8, 64, 320))" in text
    assert [row["step"] for row in rows(tmp_path / "run")] == ["1", "2", "3"]
