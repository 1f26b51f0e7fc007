"""The numbers do not depend on the mesh: weights, gradients, losses and norms against a plain PyTorch model."""

import json
from dataclasses import replace

import jobs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import default_collate

import data
import fabric_train
from llama import Llama, LlamaConfig, init_weights

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
EAGER = [(tied, recompute, False) for tied in (False, True) for recompute in ("none", "selective", "full")]
COMPILED = [(False, "none", True), (False, "selective", True), (True, "full", True)]


def random_tokens() -> torch.Tensor:
    return torch.randint(0, 320, (jobs.BATCH, jobs.LENGTH + 1), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def references():
    return {tied: jobs.plain_gradients(tied, random_tokens()) for tied in (False, True)}


def check_against(reference: dict, answers: list[dict]) -> None:
    """answers: one variant's result of each rank."""
    for answer in answers:
        assert answer["digests"] == reference["digests"]  # bitwise equal initial weights
        assert answer["keys"] == reference["keys"]
        assert answer["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert answer["norm"] == pytest.approx(reference["norm"], rel=1e-5)
    for name, expected in reference["gradients"].items():
        found = answers[0]["gradients"][name]
        assert np.linalg.norm(expected) > 0
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected), name


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_weights_and_gradients_equal_the_plain_model(group, references, mesh):
    ranks = group.run(mesh[0] * mesh[1], jobs.gradients, mesh, EAGER, random_tokens())
    for i, (tied, _, _) in enumerate(EAGER):
        check_against(references[tied], [rank[i] for rank in ranks])
    assert ranks[0][0]["logits_local"] == (jobs.BATCH // mesh[0], jobs.LENGTH, 320 // mesh[1])


@pytest.mark.parametrize("mesh, variants", [((1, 1), COMPILED[:1]), ((2, 2), COMPILED)], ids=str)
def test_compiled_gradients_equal_the_plain_model(group, references, mesh, variants):
    """With tensor size 2 a compiled first block once lost the embedding's gradient, without an error."""
    ranks = group.run(mesh[0] * mesh[1], jobs.gradients, mesh, variants, random_tokens())
    for i, (tied, _, _) in enumerate(variants):
        check_against(references[tied], [rank[i] for rank in ranks])


def hf_config(folder, tied: bool):
    """A config.json of the tiny shape, for what no preset is: a tied model of that size."""
    folder.mkdir(exist_ok=True)
    tiny = LlamaConfig.preset("tiny")
    content = {
        "model_type": "llama",
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.dim,
        "num_hidden_layers": tiny.n_layers,
        "num_attention_heads": tiny.n_heads,
        "num_key_value_heads": tiny.n_kv_heads,
        "head_dim": tiny.head_dim,
        "intermediate_size": tiny.ffn_dim,
        "rms_norm_eps": tiny.norm_eps,
        "rope_theta": tiny.rope_theta,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def plain_training(tokens_folder, tied: bool, ragged: bool, steps: int, seed: int = 3) -> tuple[list, list]:
    """Ten steps of the same training written without Fabric, FSDP, DTensor, accumulation or our loop."""
    model = Llama(replace(LlamaConfig.preset("tiny"), tied_embeddings=tied))
    init_weights(model, seed)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
        fused=False,
    )
    dataset = data.TokenDataset(tokens_folder, jobs.LENGTH)
    losses, norms = [], []
    for step in range(steps):
        windows = [data.window_of(s, len(dataset), seed) for s in range(step * jobs.BATCH, (step + 1) * jobs.BATCH)]
        rows = [(dataset[w][0], jobs.mask_some(w, dataset[w][1]) if ragged else dataset[w][1]) for w in windows]
        inputs, labels = default_collate(rows)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())  # ignores -100, divides by the valid
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        for g in optimizer.param_groups:
            g["lr"] = 1e-3
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train_arguments(out, tokens_folder, model="tiny", **options) -> list[str]:
    defaults = {
        "steps": 10,
        "seed": 3,
        "data.path": tokens_folder,
        "data.sequence_length": jobs.LENGTH,
        "data.global_batch_size": jobs.BATCH,
        "optimizer.lr": 1e-3,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "validate.every": 0,
        "checkpoints.every": 0,
        "log.every": 1,
        "log.samples_every": -1,
        "model": model,
        "out": out,
    } | options
    return [part for name, value in defaults.items() for part in (f"--{name}", str(value))]


CASES = {
    "untied": {},
    "untied, accumulation, ragged": {"micro": 1, "ragged": True},
    "untied, accumulation, ragged, selective": {"micro": 2, "ragged": True, "recompute": "selective"},
    "tied, accumulation, ragged, full": {"tied": True, "micro": 1, "ragged": True, "recompute": "full"},
    "tied, accumulation": {"tied": True, "micro": 2},
}


@pytest.fixture(scope="module")
def plain_curves(tokens):
    """The reference's losses and norms for each (tied, ragged)."""
    return {
        (tied, ragged): plain_training(tokens, tied, ragged, 10) for tied in (False, True) for ragged in (False, True)
    }


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_ten_steps_equal_a_plain_loop(group, tokens, plain_curves, tmp_path, mesh, name):
    case = {"tied": False, "micro": None, "ragged": False, "recompute": "none"} | CASES[name]
    arguments = train_arguments(
        tmp_path / "run",
        tokens,
        hf_config(tmp_path / "model", case["tied"]),
        **{
            "parallel.data": mesh[0],
            "parallel.tensor": mesh[1],
            "parallel.recompute": case["recompute"],
        },
    )
    if case["micro"]:
        arguments += ["--data.micro_batch_size", str(case["micro"])]
    results = group.run(mesh[0] * mesh[1], jobs.training, arguments, case["ragged"])
    losses, norms = plain_curves[case["tied"], case["ragged"]]
    rows = results[0]["rows"]
    assert [int(row["step"]) for row in rows] == list(range(1, 11))
    np.testing.assert_allclose([float(row["loss"]) for row in rows], losses, rtol=1e-5)
    np.testing.assert_allclose([float(row["grad_norm"]) for row in rows], norms, rtol=1e-5)

    # batches: equal within a tensor-parallel group, disjoint across data-parallel ranks, complete over the run
    given = [result["given"] for result in results]
    per_data_rank = [given[d * mesh[1]] for d in range(mesh[0])]
    for d in range(mesh[0]):
        assert all(given[d * mesh[1] + t] == per_data_rank[d] for t in range(mesh[1]))
    used = sorted(sample for rank in per_data_rank for sample, _ in rank[: 10 * jobs.BATCH // mesh[0]])
    assert used == list(range(10 * jobs.BATCH))


@pytest.mark.parametrize("mesh", [(1, 1), (1, 2)], ids=str)
@pytest.mark.parametrize(
    "precision, stored, computed",
    [
        ("32-true", "float32", "float32"),
        ("bf16-mixed", "float32", "bfloat16"),
        ("bf16", "float32", "bfloat16"),
        ("bf16-true", "bfloat16", "bfloat16"),
    ],
)
def test_precision_is_the_same_on_every_mesh(group, tokens, tmp_path, mesh, precision, stored, computed):
    arguments = train_arguments(tmp_path / "run", tokens, steps=1, precision=precision)
    arguments += ["--parallel.data", str(mesh[0]), "--parallel.tensor", str(mesh[1])]
    for found in group.run(mesh[0] * mesh[1], jobs.dtypes_inside, arguments):
        assert found == {
            "residual": computed,
            "norm": computed,
            "weight": computed,
            "tables": "float32",
            "autocast": "False",
            "master": stored,
            "gradient": stored,
            "moment": stored,
        }
    with (tmp_path / "run" / "metrics.csv").open() as file:
        loss = float(file.readlines()[1].split(",")[2])
    assert loss == pytest.approx(np.log(320) + 0.49, abs=0.6)  # a small text's labels: see README


def test_accumulated_loss_is_the_mean_over_tokens():
    """(sum, tokens) of (2, 1) and (90, 9) make 9.2, not the 6 of a mean of means; no valid token makes 0, not NaN."""
    # logits (0, x) with label 0 have the loss log(1 + e^x); choose x so that it is 2 and 10
    rows = [torch.tensor([[[0.0, float(np.log(np.expm1(value)))]] * count]) for value, count in ((2.0, 1), (10.0, 9))]
    sums = [fabric_train.token_losses(row, torch.zeros(1, row.shape[1], dtype=torch.int64)).sum() for row in rows]
    assert sum(sums).item() / 10 == pytest.approx(9.2, rel=1e-5)
    nothing = fabric_train.token_losses(rows[0], torch.full((1, 1), data.IGNORED)).sum()
    assert nothing.item() == 0.0
