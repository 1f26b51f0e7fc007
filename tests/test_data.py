"""Token folders and the order of their windows."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import ByteTokenizer, Era, Mixture, RankBatches, Shuffled, TokenDataset, prepare_documents, window_of


def counting_folder(tmp_path, tokens: int, dtype: str = "uint16", shards: int = 1):
    """A token folder whose ids are 0, 1, 2, ... in several shards."""
    import hashlib

    ids = np.arange(tokens).astype(data.tokens.DTYPES[dtype])
    described = []
    for i, part in enumerate(np.array_split(ids, shards)):
        part.tofile(tmp_path / f"train-{i:05d}.bin")
        digest = hashlib.sha256(part.tobytes()).hexdigest()
        described.append({"file": f"train-{i:05d}.bin", "tokens": len(part), "sha256": digest})
    split = {"documents": 1, "text_bytes": tokens, "shards": described}
    index = {
        "format": "fabric-llama tokens",
        "version": 1,
        "dtype": dtype,
        "vocab_size": 2**17,
        "tokenizer": "bytes",
        "begin_id": 0,
        "end_id": 1,
        "splits": {"train": split, "validation": split},
    }
    (tmp_path / "index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.mark.parametrize("tokens, length", [(1000, 7), (1001, 10), (1000, 10), (64, 63)])
@pytest.mark.parametrize("shards", [1, 3])
def test_labels_are_inputs_moved_once(tmp_path, tokens, length, shards):
    dataset = TokenDataset(counting_folder(tmp_path, tokens, shards=shards), length)
    assert len(dataset) == (tokens - 1) // length
    seen = []
    for i in range(len(dataset)):
        inputs, labels = dataset[i]
        assert inputs.shape == labels.shape == (length,) and inputs.dtype == torch.int64
        assert torch.equal(labels, inputs + 1)  # on 0, 1, 2, ... the label of k is k + 1
        seen += inputs.tolist()
    assert seen == list(range(len(dataset) * length))
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_uint32_keeps_large_ids(tmp_path):
    dataset = TokenDataset(counting_folder(tmp_path, 130_000, "uint32"), 1000)
    assert dataset[128][0][0] == 128_000  # uint16 would make it 62464


def test_too_short_a_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"64 tokens.*sequence of 64"):
        TokenDataset(counting_folder(tmp_path, 64), 64)


@pytest.mark.parametrize("windows", [1, 2, 3, 1000, 1024, 1025])
def test_every_window_once_an_epoch(windows):
    epochs = [[window_of(e * windows + i, windows, seed=7) for i in range(windows)] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(windows))
    if windows > 10:
        assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
        assert [window_of(i, windows, seed=8) for i in range(windows)] != epochs[0]


def test_order_looks_random():
    """Against a random permutation of n: about 2 neighbours stay neighbours, correlations are within 1/sqrt(n)."""
    n = 20_000
    order = np.array([window_of(i, n, seed=1) for i in range(n)])
    assert np.sum(np.abs(np.diff(order)) == 1) < 12  # expected 2, standard deviation 1.4
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 5 / math.sqrt(n)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / math.sqrt(n)
    counts = np.histogram(order[: n // 10], bins=20, range=(0, n))[0]  # the first tenth covers the text evenly
    assert ((counts - n / 200) ** 2 / (n / 200)).sum() < 50  # chi square of 19 degrees: 50 has p = 1e-4


HUGE = """
import json, sys, time
from pathlib import Path
from data import Era, Mixture, RankBatches, Shuffled, TokenDataset
import torch

def memory():  # MiB of this process itself, mapped files left out
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024

before, started = memory(), time.perf_counter()
dataset = TokenDataset(sys.argv[1], 8192)
training = Shuffled({"huge": dataset}, Mixture([Era(0, {"huge": 1.0})]), seed=0)
batches = iter(RankBatches(10**7, 64, 8, 3, 8))
rows = [training[sample][0] for sample in next(batches)]
first = time.perf_counter() - started
for _ in range(100):
    rows = [training[sample][0] for sample in next(batches)]
print(json.dumps([len(dataset), first, memory() - before, len(rows)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files and /proc")
def test_a_trillion_tokens_start_at_once(tmp_path):
    """A folder of 10^12 tokens in 3,726 files (sparse ones): the first batch in under a second, under 50 MB."""
    shard = 2**28
    count = -(-(10**12) // shard)
    described = []
    for i in range(count):
        name, tokens = f"train-{i:05d}.bin", min(shard, 10**12 - i * shard)
        with (tmp_path / name).open("wb") as file:
            file.truncate(4 * tokens)
        described.append({"file": name, "tokens": tokens, "sha256": "not compared at this size"})
    split = {"documents": 1, "text_bytes": 1, "shards": described}
    index = {
        "format": "fabric-llama tokens", "version": 1, "dtype": "uint32", "vocab_size": 128256, "tokenizer": "bytes",
        "begin_id": 0, "end_id": 1, "splits": {"train": split, "validation": {**split, "shards": described[:1]}},
    }  # fmt: skip
    (tmp_path / "index.json").write_text(json.dumps(index))
    done = subprocess.run(
        [sys.executable, "-c", HUGE, str(tmp_path)], cwd=jobs_root(), check=True, capture_output=True, text=True
    )
    windows, seconds, memory, rows = json.loads(done.stdout)
    assert windows == (10**12 - 1) // 8192 and rows == 8
    assert seconds < 1 and memory < 50, (seconds, memory)


def jobs_root() -> Path:
    return Path(data.__file__).resolve().parent.parent


def test_places_in_a_huge_order_are_even():
    """20,000 consecutive samples of 10^12 / 8192 windows: no neighbours, every twentieth of the text equally often."""
    windows, n = 10**12 // 8192, 20_000
    order = np.array([window_of(i, windows, seed=0) for i in range(5 * 10**6, 5 * 10**6 + n)])
    assert len(set(order.tolist())) == n and order.max() < windows
    assert np.abs(np.diff(order)).min() > 1
    counts = np.histogram(order, bins=20, range=(0, windows))[0]
    assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 50  # chi square of 19 degrees: 50 has p = 1e-4
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("ranks, micro", [(1, 12), (1, 3), (2, 6), (2, 2), (4, 3), (4, 1)])
def test_steps_train_on_the_same_samples_on_every_mesh(ranks, micro):
    per_step = 12 // ranks // micro
    batches = [iter(RankBatches(24, 12, micro, rank, ranks)) for rank in range(ranks)]
    for step in range(3):
        samples = [sample for rank in batches for _ in range(per_step) for sample in next(rank)]
        assert sorted(samples) == list(range(24 + 12 * step, 24 + 12 * (step + 1)))


def test_workers_do_not_change_the_order(tokens):
    dataset = Shuffled({"words": TokenDataset(tokens, 64)}, Mixture([Era(0, {"words": 1.0})]), seed=3)
    drawn = []
    for workers in (0, 2):
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=RankBatches(5, 8, 4, 0, 1), num_workers=workers)
        iterator = iter(loader)
        drawn.append(torch.stack([next(iterator)[0] for _ in range(6)]))
        del iterator
    assert torch.equal(*drawn)


def test_prepare_writes_documents_between_their_special_ids(tmp_path):
    documents = [f"Zeile {i} ü\n" * 3 for i in range(300)]
    folder = prepare_documents(documents, tmp_path / "out", ByteTokenizer())
    index = data.read_index(folder)
    found = {}
    for name, split in index["splits"].items():
        ids = np.fromfile(folder / split["shards"][0]["file"], "<u2")
        ends = np.flatnonzero(ids == 257)
        texts = [ByteTokenizer().decode(part) for part in np.split(ids, ends + 1)[:-1]]
        assert (ids == 256).sum() == len(ends) == split["documents"] == len(texts)
        assert ids[0] == 256 and ids[-1] == 257
        assert split["text_bytes"] == sum(len(t.encode()) for t in texts) == len(ids) - 2 * len(texts)
        found[name] = texts
    assert sorted(found["train"] + found["validation"]) == sorted(documents)
    assert 0 < len(found["validation"]) < 20
    # the same documents in another order: the same held-out ones
    again = prepare_documents(reversed(documents), tmp_path / "again", ByteTokenizer())
    assert data.read_index(again)["splits"]["validation"]["documents"] == len(found["validation"])
    assert data.fingerprint(index) != data.fingerprint(data.read_index(again))


def test_interrupted_prepare_leaves_nothing(tmp_path):
    def broken():
        yield "one"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_documents(broken(), tmp_path / "out", ByteTokenizer())
    assert list(tmp_path.iterdir()) == []


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    text = "Llama ラマ 🦙\x00\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < 256
    assert tokenizer.decode([256, 72, 105, 257, 300]) == "Hi"


def test_random_tokens_are_a_function_of_seed_and_index():
    a, b = data.RandomTokens(1000, 512, seed=1), data.RandomTokens(1000, 512, seed=1)
    assert torch.equal(a[2**39][0], b[2**39][0]) and not torch.equal(a[0][0], a[1][0])
    assert torch.equal(a[5][0][1:], a[5][1][:-1])
    values = torch.cat([a[i][0] for i in range(50)])
    assert values.min() >= 0 and values.max() == 999
