"""Calls that cannot work are refused with one paragraph and exit code 2, before a weight is allocated."""

import json
import shutil

import jobs
import numpy as np
import pytest

import data
from llama import LlamaConfig
from parallel import check_precision, choose_layout

TINY = LlamaConfig.preset("tiny")


def layout(devices=4, per_node=None, data="auto", tensor="auto", length=128, batch=64, micro=None, config=TINY):
    return choose_layout(
        config,
        devices=devices,
        devices_per_node=per_node or devices,
        data=data,
        tensor=tensor,
        sequence_length=length,
        global_batch=batch,
        micro_batch=micro,
    )


@pytest.mark.parametrize(
    "arguments, data_size, tensor_size",
    [
        ({"devices": 1}, 1, 1),
        ({"devices": 2}, 1, 2),
        ({"devices": 3, "batch": 63}, 3, 1),  # an odd device count
        ({"devices": 4}, 2, 2),
        ({"devices": 16, "per_node": 8}, 8, 2),
        ({"devices": 8, "per_node": 1}, 8, 1),
        ({"devices": 4, "tensor": 4}, 1, 4),
        ({"devices": 4, "data": 4}, 4, 1),
        ({"devices": 8, "per_node": 4, "data": "node", "tensor": "node"}, 2, 4),
        ({"devices": 4, "length": 127}, 4, 1),  # two ranks cannot share 127 positions
    ],
)
def test_auto_and_node(arguments, data_size, tensor_size):
    found = layout(**arguments)
    assert (found.data, found.tensor) == (data_size, tensor_size)


def test_accumulation_follows_from_the_batch():
    found = layout(devices=4, data=2, tensor=2, batch=64, micro=8)
    assert (found.micro_batch, found.accumulation) == (8, 4)
    assert layout(devices=4, batch=64).accumulation == 1


@pytest.mark.parametrize(
    "arguments, fragments",
    [
        ({"devices": 4, "data": 3, "tensor": 2}, ["3 x", "2 is 6", "4 devices", "start 6 processes"]),
        ({"devices": 4, "tensor": 3}, ["1 x", "3 is 3", "4 devices"]),
        ({"devices": 8, "tensor": 8}, ["4 (KV heads)", "largest size below it that works is 4"]),
        ({"devices": 3, "tensor": 3}, ["8 (query heads)", "320 (vocabulary)", "works is 1"]),
        ({"devices": 4, "tensor": 4, "length": 126}, ["126 (sequence length)", "works is 2"]),
        ({"devices": 4, "batch": 63}, ["63 sequences", "2 data-parallel ranks", "multiple of 2"]),
        ({"devices": 4, "batch": 64, "micro": 5}, ["leaves 32", "micro-batches of 5", "--data.micro_batch_size 4"]),
        ({"devices": 4, "batch": 64, "micro": 0}, ["micro-batches of 0"]),
        ({"devices": 4, "batch": 10**12, "micro": 7}, ["--data.micro_batch_size 5"]),
        ({"devices": 4, "batch": -8}, ["--data.global_batch_size is -8", "at least 1"]),
        ({"devices": 4, "tensor": 0}, ["--parallel.tensor is 0"]),
    ],
)
def test_sizes_that_do_not_fit_are_named(arguments, fragments):
    with pytest.raises(ValueError) as refusal:
        layout(**arguments)
    for fragment in fragments:
        assert fragment in str(refusal.value)


def test_precisions():
    assert check_precision("bf16") == "bf16-mixed" and check_precision("32") == "32-true"
    for wrong in ("16-mixed", "64-true", "transformer-engine"):
        with pytest.raises(ValueError, match=r"32-true.*bf16-mixed.*bf16-true"):
            check_precision(wrong)


CALLS = {
    "unknown option": (["--optimizer.lrr", "1"], ["--optimizer.lrr", "did you mean --optimizer.lr?"]),
    "unknown preset": (["--model", "llama9"], ["llama9", "llama3.1-8b"]),
    "ill-typed": (["--steps", "many"], ["steps", "many"]),
    "bad choice": (["--optimizer.schedule", "cubic"], ["optimizer.schedule", "cubic", "wsd"]),
    "precision": (["--precision", "16-mixed"], ["16-mixed", "bf16-mixed", "bf16-true"]),
    "launcher's option": (["--devices", "4"], ["--devices", "fabric run", "--nproc-per-node"]),
    "missing recipe": (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
    "missing data": (["--data.path", "nowhere"], ["no token folder at nowhere"]),
    "mesh": (["--parallel.tensor", "2"], ["1 x", "2 is 2", "1 device"]),
    "batch": (["--data.micro_batch_size", "7"], ["64 sequences", "micro-batches of 7"]),
    "zero steps": (["--steps", "0"], ["--steps is 0", "at least 1"]),
    "schedule": (["--optimizer.warmup_steps", "500"], ["step 100", "500 steps"]),
    "nothing kept": (["--checkpoints.keep_last", "0"], ["keep_last"]),
    "abbreviation": (["--optimizer.l", "1"], ["--optimizer.l"]),
    "negative rate": (["--optimizer.min_lr", "-1"], ["min_lr is -1", "at least 0"]),
    "beta": (["--optimizer.beta2", "1"], ["beta2 is 1", "from 0 up to"]),
    "seed": (["--seed", "-1"], ["--seed is -1"]),
    "accelerator": (["--accelerator", "tpu"], ["tpu", "cpu, cuda"]),
    "no GPU": (["--accelerator", "gpu"], ["finds no CUDA device"]),
    "missing checkpoint": (["--resume", "nowhere/step-00000001"], ["nowhere/step-00000001"]),
    "window longer than the text": (["--data.sequence_length", "1000000000"], ["too few", "1000000000"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_call(group, tmp_path, name):
    arguments, fragments = CALLS[name]
    code, message = group.run(1, jobs.refused, [*arguments, "--out", str(tmp_path / "run")])[0]
    assert code == 2
    assert message.startswith("error: ") and message.count("\n") == 1 and "Traceback" not in message
    for fragment in fragments:
        assert fragment in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text, fragments",
    [
        ("data: null", ["data"]),
        ("optimizer: 3", ["optimizer"]),
        ("optimizer: {lrr: 1}", ["lrr"]),
        ("lerning_rate: 1", ["lerning_rate"]),
        ("optimizer: {lr: [1]}", ["optimizer.lr"]),
    ],
)
def test_bad_recipe(group, tmp_path, text, fragments):
    (tmp_path / "recipe.yaml").write_text(text)
    arguments = ["--config", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")]
    code, message = group.run(1, jobs.refused, arguments)[0]
    assert code == 2 and message.startswith("error: ") and message.count("\n") == 1
    for fragment in fragments:
        assert fragment in message
    assert not (tmp_path / "run").exists()


def test_unusable_run_folder(group, tokens, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.csv").write_text("a,b\n1,2\n")
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "checkpoints").write_text("")
    for out, fragment in (
        (tmp_path / "file", "is not a folder"),
        (tmp_path / "file" / "below", "is not a folder"),
        (tmp_path / "third", "is not a folder"),
        (tmp_path / "other", "is not the metrics of a run"),
    ):
        code, message = group.run(1, jobs.refused, ["--data.path", str(tokens), "--out", str(out)])[0]
        assert code == 2 and fragment in message and message.count("\n") == 1


def test_bad_mesh_on_several_processes(group, tmp_path):
    arguments = ["--parallel.data", "3", "--out", str(tmp_path / "run")]
    for code, message in group.run(4, jobs.refused, arguments):
        assert code == 2 and "3 x tensor-parallel size 1 is 3, but the run has 4 devices" in message


def damaged(tokens, tmp_path, how):
    shutil.copytree(tokens, tmp_path / "tokens")
    folder = tmp_path / "tokens"
    index = json.loads((folder / "index.json").read_text())
    shard = folder / "train-00000.bin"
    if how == "flipped":
        content = bytearray(shard.read_bytes())
        content[100] ^= 1
        shard.write_bytes(content)
    elif how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "missing shard":
        shard.unlink()
    elif how == "not JSON":
        (folder / "index.json").write_text("{")
    elif how == "later version":
        (folder / "index.json").write_text(json.dumps(index | {"version": 2}))
    elif how == "foreign":
        (folder / "index.json").write_text(json.dumps({"format": "other"}))
    elif how == "no index":
        (folder / "index.json").unlink()
    elif how == "outside":
        index["splits"]["train"]["shards"][0]["file"] = "../tokens/train-00000.bin"
        (folder / "index.json").write_text(json.dumps(index))
    elif how == "unknown tokenizer":
        (folder / "index.json").write_text(json.dumps(index | {"tokenizer": "foo"}))
    elif how == "no text":
        index["splits"]["validation"]["text_bytes"] = 0
        (folder / "index.json").write_text(json.dumps(index))
    elif how == "larger vocabulary":
        (folder / "index.json").write_text(json.dumps(index | {"vocab_size": 50257}))
    return folder


@pytest.mark.parametrize(
    "how, fragments",
    {
        "flipped": ["train-00000.bin", "sha256"],
        "truncated": ["train-00000.bin", "bytes, index.json says"],
        "missing shard": ["train-00000.bin is missing"],
        "not JSON": ["index.json is damaged"],
        "later version": ["version 2", "reads version 1"],
        "foreign": ["not the index of a token folder"],
        "no index": ["holds no index.json"],
        "outside": ["not a file of the folder itself"],
        "unknown tokenizer": ["tokenizer 'foo' is not known"],
        "no text": ["one of its splits is empty"],
        "larger vocabulary": ["50,257", "320"],
    }.items(),
)
def test_damaged_data_is_refused(group, tokens, tmp_path, how, fragments):
    folder = damaged(tokens, tmp_path, how)
    arguments = ["--data.path", str(folder), "--out", str(tmp_path / "run")]
    code, message = group.run(1, jobs.refused, arguments)[0]
    assert code == 2 and message.count("\n") == 1
    for fragment in fragments:
        assert fragment in message
    assert not (tmp_path / "run").exists()


def test_id_outside_the_vocabulary_is_named(tmp_path):
    """uint32 ids read as they are; 128000 does not wrap, and an id that the index rules out is refused."""
    folder = data.prepare_documents((f"document {i}" for i in range(300)), tmp_path / "t", data.ByteTokenizer())
    ids = np.fromfile(folder / "train-00000.bin", "<u2")
    ids[10] = 300
    ids.tofile(folder / "train-00000.bin")
    index = json.loads((folder / "index.json").read_text())
    index["splits"]["train"]["shards"][0]["sha256"] = __import__("hashlib").sha256(ids.tobytes()).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"train-00000.bin: token 10 .* is 300, outside the vocabulary of 258"):
        data.TokenDataset(folder, 16)[0]
