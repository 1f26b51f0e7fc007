"""Several sources, documents, validation, and an order that no mesh can change: whole runs."""

import csv
import hashlib
import math
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import checkpoints
from data import ByteTokenizer, Era, Mixture, TokenDataset, adopt, window_of
from llama import Llama, init_weights
from llama.model import document_blocks, document_mask, positions_in_documents

LENGTH = 32


def random_folder(folder: Path, windows: int, seed: int, held_out: int = 7) -> Path:
    """A token folder of random bytes with a begin id now and then; so many windows of `LENGTH`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    files = {}
    for split, count in (("train", windows), ("validation", held_out)):
        ids = rng.integers(0, 256, count * LENGTH + 1).astype("<u2")
        ids[rng.random(len(ids)) < 0.1] = 256
        files[split] = [folder.with_name(f"{folder.name}-{split}.bin")]
        ids.tofile(files[split][0])
    adopt(files, folder, "uint16", 258, ByteTokenizer())
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> str:
    """Two sources, of which 240 samples are 2.5 epochs each: 57.6 and 38.4 windows at weights 0.6 and 0.4."""
    root = tmp_path_factory.mktemp("two")
    a, b = random_folder(root / "a", 58, 1), random_folder(root / "b", 38, 2)
    return f"{a}=0.6,{b}=0.4"


def call(out: Path, path: str, **options: object) -> list[str]:
    named = {
        "data.path": path, "data.sequence_length": LENGTH, "data.global_batch_size": 4, "out": out,
        "log.samples_every": -1, "log.every": 1, "validate.every": 0, "steps": 60, "optimizer.decay_steps": 60,
        "checkpoints.every": 0,
    } | options  # fmt: skip
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_elastic_order(group, two, tmp_path):
    """60 steps over 2.5 epochs of two sources, stopped at 17 and 41, on meshes (2, 2), (4, 1), (1, 1), with other
    micro-batches and loader workers: every row of ids of every step is the uninterrupted run's."""
    expected = group.run(1, jobs.received, call(tmp_path / "whole", two))[0]
    assert len(expected) == 240 and len(set(expected)) == 58 + 38
    found = []
    for ranks, tensor, micro, workers, steps in ((4, 2, 1, 0, 17), (4, 1, 1, 2, 41), (1, 1, 2, 1, 60)):
        options = {"parallel.tensor": tensor, "data.micro_batch_size": micro, "data.workers": workers, "steps": steps}
        given = group.run(ranks, jobs.received, call(tmp_path / "elastic", two, **options))
        data = ranks // tensor
        for rank in range(ranks):  # equal within a tensor-parallel group
            assert given[rank] == given[rank // tensor * tensor]
        share = 4 // data
        for step in range(len(given[0]) // share):
            found += [row for rank in range(data) for row in given[rank * tensor][step * share : (step + 1) * share]]
    assert found == expected
    whole, elastic = rows_of(tmp_path / "whole"), rows_of(tmp_path / "elastic")
    assert [row["step"] for row in elastic] == [str(step) for step in range(1, 61)]
    for a, b in zip(whole, elastic, strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-5)
        for key in ("tokens_a", "tokens_b", "tokens"):
            assert a[key] == b[key]


@pytest.mark.parametrize(
    "weights",
    [{"a": 0.7, "b": 0.3}, {"a": 1, "b": 1, "c": 1}, {"a": 1.4e-3, "b": 3, "c": 0.2, "d": 0.0171}, {"only": 5}],
)
def test_mixtures_are_exact_over_any_thousand_samples(weights):
    mixture = Mixture([Era(0, weights)])
    places = [mixture.place(n) for n in range(4000)]
    total = sum(weights.values())
    counts = {name: np.cumsum([0, *(place[0] == name for place in places)]) for name in weights}
    for name, weight in weights.items():
        inside = counts[name][1000:] - counts[name][:-1000]  # every window of 1,000
        assert np.abs(inside - 1000 * weight / total).max() <= 1, name
    seen = dict.fromkeys(weights, 0)
    for name, index in places:  # each source's samples are counted one by one
        assert index == seen[name]
        seen[name] += 1
    far = 10**12
    assert mixture.place(far)[1] == far // 1000 * (counts[mixture.place(far)[0]][1000]) + sum(
        place[0] == mixture.place(far)[0] for place in places[: far % 1000]
    )


@pytest.mark.parametrize("weights", [{"a": 1, "b": 0}, {"a": 1, "b": -1}, {"a": math.nan}, {"a": 1e5, "b": 1}, {}])
def test_weights_that_are_none(weights):
    with pytest.raises(ValueError, match=r"weights must be numbers above 0|less than one sample in 1000"):
        Mixture([Era(0, weights)])


def digests_of(two: str, seed: int = 11) -> dict[str, list[str]]:
    """What each source gives, sample by sample."""
    found = {}
    for part in two.split(","):
        folder = Path(part.split("=")[0])
        windows = TokenDataset(folder, LENGTH)
        rows = (windows[window_of(i, len(windows), seed)][0] for i in range(60))
        found[folder.name] = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in rows]
    return found


def test_reweighted_on_resume(group, two, tmp_path):
    """Other weights are refused, unless it is said from which sample on; each source then goes on where it was."""
    first = group.run(1, jobs.received, call(tmp_path / "run", two, steps=10))[0]
    other = two.replace("=0.6", "=0.2").replace("=0.4", "=0.8")
    code, said = group.run(1, jobs.refused, call(tmp_path / "run", other, steps=20))[0]
    assert code == 2 and "weights is {'a': 0.6, 'b': 0.4} there, {'a': 0.2, 'b': 0.8} here" in said
    assert "--data.change_from 40 (samples done: 40)" in said
    code, said = group.run(1, jobs.refused, call(tmp_path / "run", other, **{"data.change_from": 39}))[0]
    assert code == 2 and "has trained on 40 samples already" in said
    code, said = group.run(1, jobs.refused, call(tmp_path / "new", two, **{"data.change_from": 0}))[0]
    assert code == 2 and "holds no checkpoint" in said

    changed = {"steps": 20, "data.change_from": 48}
    middle = group.run(1, jobs.received, call(tmp_path / "run", other, **changed | {"steps": 11}))[0]
    rest = group.run(1, jobs.received, call(tmp_path / "run", other, **changed))[0]  # the same change, said again
    eras = checkpoints.read_manifest(checkpoints.latest(tmp_path / "run" / "checkpoints"))["data"]["eras"]
    assert [(era["start"], era["weights"]) for era in eras] == [(0, {"a": 0.6, "b": 0.4}), (48, {"a": 0.2, "b": 0.8})]
    found = {"a": [], "b": []}
    for place, digest in enumerate(first + middle + rest):
        name = next(name for name, known in digests_of(two).items() if digest in known)
        found[name].append(digest)
        if place == 47:
            before = len(found["a"])
    for name, known in digests_of(two).items():
        assert found[name] == known[: len(found[name])], name
    assert abs(before - 48 * 0.6) <= 1 and abs(len(found["a"]) - before - 32 * 0.2) <= 1

    # other data altogether, another length: from the checkpoint's own sample on
    longer = {"steps": 21, "data.sequence_length": 16}
    code, said = group.run(1, jobs.refused, call(tmp_path / "run", other, **longer, **{"data.change_from": 90}))[0]
    assert code == 2 and "--data.change_from 80" in said
    group.run(1, jobs.received, call(tmp_path / "run", other, **longer, **{"data.change_from": 80}))
    manifest = checkpoints.read_manifest(checkpoints.latest(tmp_path / "run" / "checkpoints"))
    assert manifest["data"]["eras"][-1]["fresh"] and manifest["samples"] == 84
    assert manifest["tokens"] == 80 * 32 + 4 * 16


def test_extended_on_resume(group, two, tmp_path):
    """A third source joins a run at a sample; the others go on where they were."""
    first = group.run(1, jobs.received, call(tmp_path / "run", two, steps=10))[0]
    c = random_folder(tmp_path / "c", 20, 3)
    longer = two.replace("=0.6", "=0.3").replace("=0.4", "=0.2") + f",{c}=0.5"
    code, said = group.run(1, jobs.refused, call(tmp_path / "run", longer, steps=20))[0]
    assert code == 2 and "fingerprint is" in said and "--data.change_from 40" in said
    rest = group.run(1, jobs.received, call(tmp_path / "run", longer, steps=20, **{"data.change_from": 40}))[0]
    known = digests_of(longer)
    found = {name: [digest for digest in first + rest if digest in digests] for name, digests in known.items()}
    assert {name: digests[: len(found[name])] for name, digests in known.items()} == found
    assert abs(len(found["c"]) - 20) <= 1 and abs(len(found["a"]) - 24 - 12) <= 1
    columns = rows_of(tmp_path / "run")[-1]
    assert columns["loss_c"] and columns["tokens_c"] and columns["loss_a"]
    assert rows_of(tmp_path / "run")[0]["loss_c"] == ""


def test_loss_by_source(group, two, tmp_path):
    """Each source's loss is that of its own windows, its tokens are counted, at a learning rate of 0."""
    options = {"steps": 5, "optimizer.lr": 0, "log.every": 5, "parallel.tensor": 2}
    group.run(4, jobs.training, call(tmp_path / "run", two, **options))
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == ["1", "5"]
    model = Llama(jobs.small_config(tied=False))
    init_weights(model, 11)
    folders = {Path(part.split("=")[0]).name: part.split("=")[0] for part in two.split(",")}
    datasets = {name: TokenDataset(folder, LENGTH) for name, folder in folders.items()}
    mixture = Mixture([Era(0, {"a": 0.6, "b": 0.4})])
    for row, samples in zip(rows, (range(4), range(4, 20)), strict=True):
        losses: dict[str, list[float]] = {"a": [], "b": []}
        for sample in samples:
            name, index = mixture.place(sample)
            inputs, labels = datasets[name][window_of(index, len(datasets[name]), 11)]
            with torch.no_grad():
                losses[name].append(F.cross_entropy(model(inputs[None])[0], labels).item())
        for name, found in losses.items():
            assert int(row[f"tokens_{name}"]) == len(found) * LENGTH
            assert float(row[f"loss_{name}"]) == pytest.approx(sum(found) / len(found), rel=1e-5)


def test_sources_that_do_not_fit(group, two, tmp_path):
    a, b = (part.split("=")[0] for part in two.split(","))
    ids = [np.arange(99, dtype="<u2") for _ in range(2)]
    for name, part in zip(("t.bin", "v.bin"), ids, strict=True):
        part.tofile(tmp_path / name)
    adopt({"train": [tmp_path / "t.bin"], "validation": [tmp_path / "v.bin"]}, tmp_path / "c", "uint16", 258)
    for path, fragment in (
        (f"{a}=0.5,{tmp_path}/c=0.5", "different tokenizers: tokenizer is bytes in"),
        (f"{a}=0.5,{b}", "is not FOLDER=WEIGHT"),
        (f"{a}=x,{b}=1", "is not FOLDER=WEIGHT"),
        (f"{a}=1,{a}/../a=1", "different names"),
        (f"{a}=1,{b}=0", "numbers above 0"),
        (f"{a}=1,{a}-gone=1", "there is no token folder"),
    ):
        code, said = group.run(1, jobs.refused, call(tmp_path / "run", path))[0]
        assert code == 2 and fragment in said, said
    code, said = group.run(1, jobs.refused, call(tmp_path / "run", f"{tmp_path}/c", **{"data.mask_documents": True}))[0]
    assert code == 2 and "neither which id begins a document" in said
    code, said = group.run(1, jobs.refused, call(tmp_path / "run", "random", **{"data.mask_documents": True}))[0]
    assert code == 2 and "random tokens are no documents" in said
    assert not (tmp_path / "run").exists()


def test_validation_is_the_same_for_every_batch_and_mesh(group, two, tmp_path):
    """To 1e-6, in nats a token and bits a byte, over both sources' held-out windows, and as a plain model has it."""
    found = []
    for i, (ranks, tensor, micro) in enumerate(((1, 1, 4), (1, 1, 1), (2, 1, 2), (2, 2, 2), (4, 2, 1), (4, 1, 1))):
        options = {
            "steps": 1, "optimizer.lr": 0, "parallel.tensor": tensor, "data.micro_batch_size": micro,
            "validate.every": 1, "validate.sequences": 9,
        }  # fmt: skip
        group.run(ranks, jobs.training, call(tmp_path / f"run{i}", two, **options))
        row = rows_of(tmp_path / f"run{i}")[-1]
        found.append((float(row["validation_loss"]), float(row["validation_bits_per_byte"])))
    for loss, bits in found:
        assert loss == pytest.approx(found[0][0], rel=1e-6) and bits == pytest.approx(found[0][1], rel=1e-6)
    model = Llama(jobs.small_config(tied=False))
    init_weights(model, 11)
    held_out = [TokenDataset(part.split("=")[0], LENGTH, "validation") for part in two.split(",")]
    windows = [window for dataset in held_out for window in (dataset[i] for i in range(len(dataset)))]
    chosen = [windows[i * len(windows) // 9] for i in range(9)]
    with torch.no_grad():
        mean = np.mean([F.cross_entropy(model(x[None])[0], y, reduction="mean").item() for x, y in chosen])
    per_byte = sum(d.tokens for d in held_out) / sum(d.text_bytes for d in held_out)
    assert found[0][0] == pytest.approx(mean, rel=1e-6)
    assert found[0][1] == pytest.approx(mean / math.log(2) * per_byte, rel=1e-6)


def test_validation_changes_nothing(group, two, tmp_path):
    """A run that validates at every step trains on the same ids, to the same losses and weights, to the last bit."""
    runs = []
    for every in (0, 1):
        out = tmp_path / f"every{every}"
        given = group.run(2, jobs.received, call(out, two, steps=5, **{"validate.every": every, "seed": 3}))
        path = checkpoints.latest(out / "checkpoints")
        shards = {p.name: p.read_bytes() for p in path.glob("*.distcp")}
        runs.append((given, [(row["loss"], row["grad_norm"]) for row in rows_of(out)], shards))
    assert runs[0][0] == runs[1][0] and runs[0][1] == runs[1][1] and runs[0][2] == runs[1][2]


def documents_and_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (4, 65) with begin ids at uneven places, and the document of each input (4, 64)."""
    tokens = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
    for row, begins in enumerate(([0, 20, 21], [5, 40], [], [0, 63])):
        tokens[row, begins] = 256
    return tokens, (tokens[:, :-1] == 256).cumsum(1)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("mesh", [(1, 1), (1, 2), (2, 2), (1, 4)])
def test_attention_stays_inside_a_document(group, mesh, recompute):
    """Each document's logits, and the gradients, are those of the document alone; and they do not change by a bit
    when another document does."""
    tokens, documents = documents_and_tokens()
    ranks = math.prod(mesh)
    found = group.run(ranks, jobs.within_documents, mesh, recompute, tokens, documents)
    logits = np.concatenate([found[rank]["logits"] for rank in range(0, ranks, mesh[1])])
    model = Llama(jobs.small_config(tied=False))
    init_weights(model, 5)
    for row in range(4):
        for number in documents[row].unique():
            places = (documents[row] == number).nonzero()[:, 0]
            alone = model(tokens[row, places][None])[0]
            assert np.allclose(logits[row, places], alone.detach().numpy(), rtol=1e-5, atol=1e-5)
            F.cross_entropy(alone, tokens[row, places + 1], reduction="sum").backward()
    for name, p in model.named_parameters():
        wanted = p.grad.numpy()
        assert np.abs(found[0]["gradients"][name] - wanted).max() < 1e-5 * np.abs(wanted).max() + 1e-6, name

    changed = tokens.clone()
    inside = documents == documents[:, :1]  # the first document of each row
    changed[:, :-1][inside & (tokens[:, :-1] != 256)] = 7
    again = group.run(ranks, jobs.within_documents, mesh, recompute, changed, documents)
    after = np.concatenate([again[rank]["logits"] for rank in range(0, ranks, mesh[1])])
    assert np.array_equal(after[~inside.numpy()], logits[~inside.numpy()])
    assert not np.array_equal(after[inside.numpy()], logits[inside.numpy()])


@pytest.mark.parametrize("length", [128, 512, 700])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_hold_what_the_mask_holds(length, seed):
    """The block mask of the GPU's kernel against the whole matrix: no pair lost, and no block kept in vain."""
    borders = torch.rand(3, length, generator=torch.Generator().manual_seed(seed)) < [0.001, 0.01, 0.1, 0.004][seed]
    documents = borders.cumsum(1)
    dense = document_mask(documents)[:, 0]
    mask = document_blocks(documents)
    blocks = -(-length // 128)
    padded = F.pad(dense, (0, blocks * 128 - length, 0, blocks * 128 - length))
    tiles = padded.view(3, blocks, 128, blocks, 128)
    assert torch.equal(mask.to_dense()[:, 0].bool(), tiles.any(4).any(2))
    index = torch.arange(length)
    b, q, k = torch.arange(3)[:, None, None], index[:, None], index[None, :]
    assert torch.equal(mask.mask_mod(b, 0, q, k), dense)
    whole = torch.zeros(3, blocks, blocks, dtype=torch.bool)
    for row in range(3):
        for block in range(blocks):
            for n in range(int(mask.full_kv_num_blocks[row, 0, block])):
                whole[row, block, mask.full_kv_indices[row, 0, block, n]] = True
    assert (tiles.all(4).all(2)[whole]).all()
    if seed == 0 and length > 300:
        assert whole.any()


def test_positions_start_anew_in_each_document():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 4, 5]])
    assert positions_in_documents(documents).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0]]


def test_a_masked_run_is_the_same_on_every_mesh(group, two, tmp_path):
    losses = []
    for i, (ranks, tensor) in enumerate(((1, 1), (2, 2), (4, 2))):
        options = {"steps": 4, "parallel.tensor": tensor, "data.mask_documents": True, "validate.every": 2}
        group.run(ranks, jobs.training, call(tmp_path / f"run{i}", two, **options))
        rows = rows_of(tmp_path / f"run{i}")
        losses.append([(float(row["loss"]), float(row["validation_loss"] or 0)) for row in rows])
    assert np.allclose(losses[1], losses[0], rtol=1e-5) and np.allclose(losses[2], losses[0], rtol=1e-5)
    group.run(1, jobs.training, call(tmp_path / "open", two, steps=1))
    assert abs(float(rows_of(tmp_path / "open")[0]["loss"]) - losses[0][0][0]) > 1e-5
