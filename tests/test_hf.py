"""Published weights in and out, against transformers, an independent implementation."""

import csv
import json
import math
import shutil
import socket
import sys
from pathlib import Path

import jobs
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import checkpoints
from checkpoints.__main__ import main as checkpoints_main
from checkpoints.convert import CheckpointWeights, from_hf, to_hf
from data import TokenDataset
from llama import Llama, LlamaConfig, init_weights, load_hf, load_weights, open_weights, save_hf
from llama.hf import hf_names, parameter_shapes, write_hf

ORIGINAL = 64  # positions before scaling; the tests' sequences are longer
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
SHAPES = {
    "grouped, own head size": {},
    "tied": {"tie_word_embeddings": True},
    "scaled": {"rope_parameters": SCALED},
    "tied, scaled, one KV head for each": {
        "tie_word_embeddings": True,
        "rope_parameters": SCALED,
        "num_key_value_heads": 4,
    },
}


def random_hf(folder: Path, dtype=torch.float32, max_shard_size="5GB", **changes):
    """A random transformers Llama with distinct norm weights, saved; returns it."""
    from transformers import LlamaConfig as HfConfig
    from transformers import LlamaForCausalLM

    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # 64 / 4 is 16
        "intermediate_size": 96,
        "rms_norm_eps": 3e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 7000.0},
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    torch.manual_seed(len(str(changes)))
    model = LlamaForCausalLM(HfConfig(**sizes | changes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else 0.1 * torch.randn_like(p))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return model.float()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folder and transformers model of each shape."""
    root = tmp_path_factory.mktemp("published")
    return {name: (root / str(i), random_hf(root / str(i), **SHAPES[name])) for i, name in enumerate(SHAPES)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_gradients_are_those_of_transformers(group, published, shape):
    """On meshes (1, 1) and (2, 2), at positions three times past the original length."""
    folder, theirs = published[shape]
    tokens = torch.randint(0, 320, (2, 3 * ORIGINAL + 1), generator=torch.Generator().manual_seed(0))
    theirs.zero_grad()
    expected = theirs(tokens[:, :-1]).logits
    F.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    for mesh in ((1, 1), (2, 2)):
        ours = group.run(math.prod(mesh), jobs.imported, mesh, str(folder), tokens)[0]
        assert abs(ours["logits"] - expected.detach().numpy()).max() < 1e-4
        names = hf_names(LlamaConfig.from_hf(folder))
        assert sorted(names.values()) == sorted(gradients)
        for name, found in ours["gradients"].items():
            wanted = gradients[names[name]]
            assert abs(wanted).max() > 0
            assert abs(found - wanted).max() < 1e-4 * abs(wanted).max(), (mesh, name)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_export_opens_in_transformers(published, shape, tmp_path):
    """A file that is written from the config alone, without anything carried from an import."""
    from transformers import AutoModelForCausalLM

    folder, theirs = published[shape]
    save_hf(load_hf(folder), tmp_path / "out")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.dtype == torch.float32
    tokens = torch.randint(0, 320, (2, 3 * ORIGINAL), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, theirs(tokens).logits)
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) is ("tied" not in shape)
    assert LlamaConfig.from_hf(tmp_path / "out") == LlamaConfig.from_hf(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_there_and_back_gives_the_same_files(tmp_path, dtype, shard):
    random_hf(tmp_path / "in", dtype, shard)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    from_hf(tmp_path / "in", tmp_path / "checkpoint")
    assert checkpoints.verify(tmp_path / "checkpoint")["weights_only"] is True
    to_hf(tmp_path / "checkpoint", tmp_path / "out")
    assert contents(tmp_path / "in") == contents(tmp_path / "out")
    assert (len(list((tmp_path / "in").glob("*.safetensors"))) > 1) is (shard == "100KB")


def test_an_export_says_what_it_holds(tmp_path):
    random_hf(tmp_path / "in", torch.float32, "100KB")
    from_hf(tmp_path / "in", tmp_path / "checkpoint")
    assert (
        checkpoints_main(
            ["to-hf", f"{tmp_path}/checkpoint", f"{tmp_path}/out", "--dtype", "bf16", "--max_shard_gb", "1e-4"]
        )
        == 0
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = [
        (path.name, key, tensor)
        for path in (tmp_path / "out").glob("*.safetensors")
        for key, tensor in load_file(path).items()
    ]
    assert {key: name for name, key, _ in stored} == index["weight_map"]
    assert {tensor.dtype for *_, tensor in stored} == {torch.bfloat16}
    assert sum(tensor.nbytes for *_, tensor in stored) == index["metadata"]["total_size"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    whole = load_hf(tmp_path / "in").state_dict()
    assert all(torch.equal(load_hf(tmp_path / "out").state_dict()[key], whole[key].bfloat16()) for key in whole)


def options(out: Path, tokens: Path, folder: Path, steps: int = 1) -> list[str]:
    return [
        *("--init_from", str(folder), "--out", str(out), "--data.path", str(tokens), "--steps", str(steps)),
        *("--data.sequence_length", "64", "--data.global_batch_size", "4", "--log.samples_every", "-1"),
        *("--optimizer.lr", "0", "--validate.sequences", "5"),
    ]


def test_a_run_starts_from_published_weights(group, published, tokens, tmp_path):
    """Step 0's loss is transformers'; a learning rate of 0 gives the import back to the last bit, from mesh (2, 2)."""
    folder, theirs = published["grouped, own head size"]
    group.run(4, jobs.training, options(tmp_path / "run", tokens, folder))
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1"] and rows[0]["loss"] == ""
    held_out = TokenDataset(tokens, 64, "validation")
    count = min(5, len(held_out))
    chosen = [held_out[i * len(held_out) // count] for i in range(count)]
    with torch.no_grad():
        losses = [F.cross_entropy(theirs(inputs[None]).logits[0], labels).item() for inputs, labels in chosen]
    mean = sum(losses) / len(losses)
    assert float(rows[0]["validation_loss"]) == pytest.approx(mean, rel=1e-5)
    bits = mean / math.log(2) * held_out.tokens / held_out.text_bytes
    assert float(rows[0]["validation_bits_per_byte"]) == pytest.approx(bits, rel=1e-5)

    checkpoint = checkpoints.latest(tmp_path / "run" / "checkpoints")
    source = checkpoints.read_manifest(checkpoint)["source"]
    assert source == {"path": str(folder), "fingerprint": open_weights(folder).fingerprint(), "dtype": "fp32"}
    to_hf(checkpoint, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    # the tokenizer is the data's, and ends texts with its own id
    assert {"tokenizer.json", "tokenizer_config.json"} <= contents(tmp_path / "out").keys()
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["bos_token_id"], said["eos_token_id"], said["vocab_size"]) == (256, 257, 320)

    # from the run's checkpoint, and from an import, another run begins with the same weights, and is told its own name
    from_hf(folder, tmp_path / "imported")
    for number, start in enumerate((checkpoint, tmp_path / "imported")):
        out = tmp_path / f"again{number}"
        group.run(2, jobs.training, options(out, tokens, start))
        with (out / "metrics.csv").open(newline="") as file:
            again = list(csv.DictReader(file))
        assert float(again[0]["validation_loss"]) == pytest.approx(mean, rel=1e-5)
        assert CheckpointWeights(checkpoints.latest(out / "checkpoints")).describe()["dtype"] == "fp32"

    # to go on is to go on: other weights than the run's are refused, none at all is fine
    code, said = group.run(1, jobs.refused, options(tmp_path / "run", tokens, tmp_path / "imported", 2))[0]
    assert code == 2 and "began from other weights" in said and source["fingerprint"] in said
    without = options(tmp_path / "run", tokens, folder, 2)[2:]
    group.run(1, jobs.training, [*without, "--model", str(folder)])
    assert checkpoints.read_manifest(checkpoints.latest(tmp_path / "run" / "checkpoints"))["source"] == source
    code, said = group.run(
        1,
        jobs.refused,
        [*without, *("--model", str(folder), "--out", f"{tmp_path}/fresh", "--resume", f"{tmp_path}/imported")],
    )[0]
    assert code == 2 and f"--init_from {tmp_path}/imported" in said


def test_bf16_weights_leave_a_run_as_they_came(group, tokens, tmp_path):
    random_hf(tmp_path / "in", torch.bfloat16, "100KB", tie_word_embeddings=True)
    group.run(2, jobs.training, options(tmp_path / "run", tokens, tmp_path / "in"))
    checkpoint = checkpoints.latest(tmp_path / "run" / "checkpoints")
    assert CheckpointWeights(checkpoint).dtype == torch.float32
    folder, dtype = to_hf(checkpoint, tmp_path / "out")
    assert dtype == "bf16"
    files, exported = contents(tmp_path / "in"), contents(folder)
    assert len(files) > 4
    assert all(exported[name] == files[name] for name in files if "safetensors" in name)


def rewrite(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def retensor(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def replace_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def quantise(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int8)


def several(tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    tensors["model.norm.weight"] = torch.zeros(63)
    del tensors["model.layers.2.mlp.up_proj.weight"]


def unindex(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = {key: "model-00001-of-00002.safetensors" for key in load_file(folder / "model-00001-of-00002.safetensors")}
    files["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def escape(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "x.safetensors")
    index = {"weight_map": {"lm_head.weight": "../x.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


REFUSALS = {
    "architecture": (lambda f: rewrite(f, model_type="mistral"), ["model_type is 'mistral'"]),
    "classifier": (
        lambda f: rewrite(f, architectures=["LlamaForSequenceClassification"]),
        ["LlamaForSequenceClassification"],
    ),
    "attention bias": (lambda f: rewrite(f, attention_bias=True), ["attention_bias is true"]),
    "mlp bias": (lambda f: rewrite(f, mlp_bias=True), ["mlp_bias is true"]),
    "rope_type": (
        lambda f: rewrite(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        ["rope_type is 'yarn'"],
    ),
    "activation": (lambda f: rewrite(f, hidden_act="gelu"), ["hidden_act is 'gelu'"]),
    "window": (lambda f: rewrite(f, sliding_window=4096), ["sliding_window is 4096"]),
    "partial rotation": (lambda f: rewrite(f, partial_rotary_factor=0.5), ["partial_rotary_factor is 0.5"]),
    "quantised": (lambda f: rewrite(f, quantization_config={"bits": 4}), ["quantised (quantization_config)"]),
    "quantised tensors": (lambda f: retensor(f, quantise), ["1 quantised", "up_proj.weight is I8"]),
    "tied, head differs": (
        lambda f: (rewrite(f, tie_word_embeddings=True), retensor(f, replace_head)),
        ["tie_word_embeddings true", "lm_head.weight differs"],
    ),
    "untied, no head": (
        lambda f: retensor(f, lambda t: t.pop("lm_head.weight")),
        ["tie_word_embeddings false", "no lm_head"],
    ),
    "several": (
        lambda f: retensor(f, several),
        [
            "1 missing: model.layers.2.mlp.up_proj.weight",
            "1 unknown: model.layers.0.self_attn.q_proj.bias",
            "1 of another shape: model.norm.weight is (63,), not (64,)",
        ],
    ),
    "missing shard": (unindex, ["lacks 1 of the 2 files", "model-00002-of-00002.safetensors"]),
    "cut short": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        ["model.safetensors is damaged"],
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ["neither config.json"]),
    "scaling said twice": (
        lambda f: rewrite(f, rope_parameters={"rope_type": "default", "rope_theta": 7000.0}, rope_scaling=SCALED),
        ["rope_parameters says", "rope_scaling {"],
    ),
    "theta said twice": (lambda f: rewrite(f, rope_theta=8000.0), ["rope_theta twice: 7000.0", "8000.0"]),
    "original length said twice": (
        lambda f: rewrite(f, rope_parameters=SCALED, original_max_position_embeddings=128),
        ["original_max_position_embeddings twice: 64", "128"],
    ),
    "no theta": (lambda f: rewrite(f, rope_parameters={"rope_theta": 0}), ["rope_theta is 0.0"]),
    "a flag that is none": (lambda f: rewrite(f, tie_word_embeddings="false"), ["tie_word_embeddings is 'false'"]),
    "not text": (lambda f: (f / "config.json").write_bytes(b"\xff{}"), ["config.json is not JSON"]),
    "index out of its folder": (escape, ["names something else than .safetensors files in its own folder"]),
    "only torch files": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        ["pytorch_model.bin", "does not read"],
    ),
    "no folder": (shutil.rmtree, ["there is no folder"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_and_nothing_changed(published, case, tmp_path, capsys):
    """By the library before a weight of a model changes, by `from-hf` and by a run before anything is written."""
    damage, fragments = REFUSALS[case]
    folder = tmp_path / "in"
    shutil.copytree(published["grouped, own head size"][0], folder)
    model = load_hf(folder)
    before = {name: p.clone() for name, p in model.named_parameters()}
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as refusal:
        load_weights(model, open_weights(folder))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert checkpoints_main(["from-hf", str(folder), f"{tmp_path}/checkpoint"]) == 2
    assert str(refusal.value) in capsys.readouterr().err
    code, said = jobs.refused(["--init_from", str(folder), "--out", f"{tmp_path}/run"])
    assert code == 2 and said == f"error: {refusal.value}\n"
    for fragment in fragments:
        assert fragment in said
    assert "\n" not in str(refusal.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"in"}


def test_an_existing_folder_is_never_touched(published, tmp_path, capsys):
    folder = published["tied"][0]
    for name in ("checkpoint", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("kept")
    from_hf(folder, tmp_path / "good")
    for call in (
        ["from-hf", str(folder), f"{tmp_path}/checkpoint"],
        ["to-hf", f"{tmp_path}/good", f"{tmp_path}/out"],
        ["consolidate", f"{tmp_path}/good", f"{tmp_path}/out/mine"],
    ):
        assert checkpoints_main(call) == 2
        assert "exists" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == (tmp_path / "checkpoint" / "mine").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "good", "out"]


def test_an_export_is_complete_or_absent(published, tmp_path, monkeypatch):
    from_hf(published["tied"][0], tmp_path / "good")
    read, calls = CheckpointWeights.read, []

    def fail_late(self, name):
        calls.append(name)
        if len(calls) > 10:
            raise OSError("the disk is full")
        return read(self, name)

    monkeypatch.setattr(CheckpointWeights, "read", fail_late)
    with pytest.raises(OSError, match="full"):
        to_hf(tmp_path / "good", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_damaged_checkpoints_are_not_exported(published, tmp_path, capsys):
    from_hf(published["tied"][0], tmp_path / "good")
    shard = next((tmp_path / "good").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert checkpoints_main(["verify", f"{tmp_path}/good"]) == 1
    assert f"{shard} is damaged" in capsys.readouterr().out
    assert checkpoints_main(["to-hf", f"{tmp_path}/good", f"{tmp_path}/out"]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_consolidate(published, tmp_path, name):
    folder, _ = published["scaled"]
    from_hf(folder, tmp_path / "checkpoint")
    assert checkpoints_main(["consolidate", f"{tmp_path}/checkpoint", f"{tmp_path}/{name}"]) == 0
    if name.endswith(".pt"):
        content = torch.load(tmp_path / name, weights_only=True)
        state = content["model"]
        assert LlamaConfig.from_dict(content["config"]) == LlamaConfig.from_hf(folder) and content["step"] == 0
    else:
        state = load_file(tmp_path / name)
    expected = load_hf(folder).state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected)


def test_fingerprints_tell_weights_apart(published, tmp_path):
    folder = published["grouped, own head size"][0]
    shutil.copytree(folder, tmp_path / "copy")
    assert open_weights(tmp_path / "copy").fingerprint() == open_weights(folder).fingerprint()
    retensor(tmp_path / "copy", lambda t: t["model.layers.1.mlp.down_proj.weight"][0].add_(1e-3))
    assert open_weights(tmp_path / "copy").fingerprint() != open_weights(folder).fingerprint()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_import_and_export(group, tmp_path):
    """A 420 MB model: an import on 4 processes peaks, summed, below 2 x model + 4 x shard; an export in files of 50 MB
    needs such a file, twice its largest tensor, and the reader's buffers: nothing of the model's size."""
    config = LlamaConfig(8192, 1024, 7, 16, 8, 64, 3072)
    model = Llama(config)
    size = 4 * config.parameters / 2**20
    assert 400 < size < 450
    save_hf(model, tmp_path / "in")
    del model
    found = group.run(4, jobs.memory_of_import_and_export, str(tmp_path / "in"), str(tmp_path))
    peaks, shards = [f["peak"] for f in found], [f["shard"] for f in found]
    assert sum(shards) == pytest.approx(size, rel=0.01)
    assert sum(shards) <= sum(peaks) <= 2 * size + sum(shards), peaks
    largest = 4 * 8192 * 1024 / 2**20
    assert 40 < found[0]["export"] < 50 + 2 * largest + 30 < size / 2
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) >= 8


def meta_layout(theirs, folder: Path, pieces: int, llama2: bool = False, **params) -> None:
    """What Meta would have published: neighbouring pairs in wq and wk, cut over model-parallel ranks."""
    c = theirs.config
    state = theirs.state_dict()
    whole = {}
    for ours, name in hf_names(LlamaConfig._from_hf(json.loads(c.to_json_string()))).items():
        w = state[name]
        if ours.endswith(("wq.weight", "wk.weight")):
            w = w.view(-1, 2, c.head_dim // 2, w.shape[1]).transpose(1, 2).reshape(w.shape)
        whole[ours] = w.bfloat16()
    folder.mkdir()
    for rank in range(pieces):
        piece = {"rope.freqs": torch.ones(4)}
        for name, w in whole.items():
            axis = 1 if name.endswith(("wo.weight", "w2.weight")) or (llama2 and "tok" in name) else 0
            piece[name] = w.clone() if w.ndim == 1 else w.chunk(pieces, axis)[rank].clone()
        torch.save(piece, folder / f"consolidated.{rank:02d}.pth")
    content = {
        "dim": c.hidden_size,
        "n_layers": c.num_hidden_layers,
        "n_heads": c.num_attention_heads,
        "n_kv_heads": c.num_key_value_heads,
        "vocab_size": -1 if llama2 else c.vocab_size,
        "multiple_of": 32,
        "ffn_dim_multiplier": 0.75,  # int(2 * 4 * 64 / 3) = 170, x 0.75 = 127, up to a multiple of 32 = 128
        "norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_parameters["rope_theta"],
    }
    (folder / "params.json").write_text(json.dumps({**content, **params}))


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("case", ["llama 2", "llama 3", "3.1", "3.2"])
def test_metas_own_layout(tmp_path, case, pieces):
    """Factor 8 with an output of its own, 32 with a tied one, on positions past the original length."""
    scaling = SCALED | {"original_max_position_embeddings": 8192, "factor": 32.0 if case == "3.2" else 8.0}
    changes = {"intermediate_size": 128, "head_dim": 16, "tie_word_embeddings": case == "3.2"}
    if case in ("3.1", "3.2"):
        changes["rope_parameters"] = scaling
    theirs = random_hf(tmp_path / "hf", torch.bfloat16, **changes)
    extra = {"use_scaled_rope": True} if case in ("3.1", "3.2") else {}
    meta_layout(theirs, tmp_path / "meta", pieces, llama2=case == "llama 2", **extra)
    weights = open_weights(tmp_path / "meta")
    hf = open_weights(tmp_path / "hf")
    ours = {key: value for key, value in weights.config.to_dict().items() if key != "max_position"}
    assert ours == {key: value for key, value in hf.config.to_dict().items() if key != "max_position"}
    for name, shape in parameter_shapes(weights.config).items():
        parts = [tuple(slice(0, n) for n in shape)]
        parts.append(tuple(slice(n // 3, n // 3 + max(1, n // 2)) for n in shape))
        parts.append(tuple(slice(n - 1, n) for n in shape))
        for part in parts:
            assert torch.equal(weights.tensors[name][part], hf.tensors[name][part]), (name, part)
    from_hf(tmp_path / "meta", tmp_path / "checkpoint")
    read = CheckpointWeights(tmp_path / "checkpoint").read
    expected = load_hf(tmp_path / "hf").state_dict()
    assert all(torch.equal(read(name), tensor) for name, tensor in expected.items())


def test_metas_pieces_must_all_be_there(tmp_path):
    theirs = random_hf(tmp_path / "hf", intermediate_size=128, head_dim=16)
    meta_layout(theirs, tmp_path / "meta", 4)
    (tmp_path / "meta" / "consolidated.01.pth").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds 3 pieces, but not consolidated.01.pth"):
        open_weights(tmp_path / "meta")
    meta_layout(theirs, tmp_path / "two", 2, n_layers=2, vocab_size=321)
    (tmp_path / "two" / "extra").mkdir()
    with pytest.raises(
        ValueError, match=r"9 unknown: layers.2.*2 of another shape: tok_embeddings.weight is \(320, 64\)"
    ):
        open_weights(tmp_path / "two")
    (tmp_path / "two" / "consolidated.00.pth").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"consolidated.00.pth cannot be read"):
        open_weights(tmp_path / "two")


def test_metas_pieces_must_fit(tmp_path):
    """A piece's type and shape, and norms that differ between pieces, are not taken from the first piece."""
    theirs = random_hf(tmp_path / "hf", intermediate_size=128, head_dim=16)
    meta_layout(theirs, tmp_path / "meta", 2)
    file = tmp_path / "meta" / "consolidated.01.pth"
    piece = torch.load(file)
    for change, said in (
        ({"layers.0.attention.wv.weight": piece["layers.0.attention.wv.weight"].to(torch.int8)}, "int8"),
        ({"norm.weight": piece["norm.weight"] + 1}, "norm.weight differs between the pieces"),
        ({"layers.0.attention.wq.weight": torch.zeros(32, 63).bfloat16()}, "do not fit together"),
        ({"norm.weight": torch.tensor(1.0)}, "something else than named dense tensors"),
    ):
        torch.save(piece | change, file)
        with pytest.raises(ValueError, match=said):
            open_weights(tmp_path / "meta")


def test_an_index_that_is_not_used_does_not_travel(published, tmp_path):
    """It could name any file, also outside the export."""
    shutil.copytree(published["tied"][0], tmp_path / "in")
    weights = open_weights(tmp_path / "in")
    files = {key: "../../escaped.safetensors" for key in hf_names(weights.config).values()}
    index = {"metadata": {"total_size": 4 * weights.config.parameters}, "weight_map": files}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    from_hf(tmp_path / "in", tmp_path / "deep" / "checkpoint")
    to_hf(tmp_path / "deep" / "checkpoint", tmp_path / "deep" / "out")
    assert "model.safetensors" in contents(tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("escaped*"))
    (tmp_path / "deep" / "checkpoint" / "assets" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names something else"):
        write_hf(tmp_path / "direct", weights.config, lambda n: weights.tensors[n][(slice(0, 1),)], torch.float32,
                 {"model.safetensors.index.json": tmp_path / "in" / "model.safetensors.index.json"})  # fmt: skip
    assert not (tmp_path / "direct").exists() and not list(tmp_path.rglob("escaped*"))


def test_tensors_of_several_types_keep_their_values(tmp_path):
    random_hf(tmp_path / "in", torch.bfloat16)
    norm = 1 + torch.arange(64) / 1e5  # none of which bf16 holds, apart from 1
    retensor(tmp_path / "in", lambda t: t.update({"model.norm.weight": norm}))
    from_hf(tmp_path / "in", tmp_path / "checkpoint")
    folder, dtype = to_hf(tmp_path / "checkpoint", tmp_path / "out")
    assert dtype == "fp32" and torch.equal(load_hf(folder).norm.weight, norm)
    assert torch.equal(load_hf(tmp_path / "in").norm.weight, norm)


def test_exports_can_be_read_by_others(published, tmp_path):
    save_hf(load_hf(published["tied"][0]), tmp_path / "out")
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1


def test_leftovers_of_killed_conversions_go(published, tmp_path):
    dead = tmp_path / f".out.{socket.gethostname()}-999999999.partial"
    dead.mkdir()
    (dead / "half").write_text("x")
    alive = tmp_path / f".out.{socket.gethostname()}-1.partial"
    alive.mkdir()
    save_hf(load_hf(published["tied"][0]), tmp_path / "out")
    assert not dead.exists() and alive.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"model": {}}, {"model": {"dim": 5}}, {"files": {"meta.pt": None}}, {"tokens": None}, {"mesh": "x"},
        {"source": "x"}, {"step": "1"},
    ],
)  # fmt: skip
def test_damaged_manifests_are_refused(published, tmp_path, change, capsys):
    from_hf(published["tied"][0], tmp_path / "c")
    path = tmp_path / "c" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert checkpoints_main(["to-hf", f"{tmp_path}/c", f"{tmp_path}/out"]) == 2
    assert "is damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_run_goes_on_without_the_folder_it_began_from(group, tokens, tmp_path):
    """Named as a preset is; begun from a run folder; then gone."""
    random_hf(tmp_path / "llama3.2-1b")
    began = options(tmp_path / "first", tokens, tmp_path / "llama3.2-1b")
    group.run(1, jobs.training, began)
    second = options(tmp_path / "second", tokens, tmp_path / "first")
    group.run(1, jobs.training, second)
    manifest = checkpoints.read_manifest(checkpoints.latest(tmp_path / "second" / "checkpoints"))
    assert manifest["source"]["path"] == str(checkpoints.latest(tmp_path / "first" / "checkpoints"))
    shutil.rmtree(tmp_path / "llama3.2-1b")
    for again in (began, began[2:]):
        rows = group.run(1, jobs.training, [*again, "--steps", str(2 + (again is not began))])[0]["rows"]
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    code, said = group.run(1, jobs.refused, options(tmp_path / "third", tokens, tmp_path / "llama3.2-1b"))[0]
    assert code == 2 and "there is no folder" in said
    code, said = group.run(1, jobs.refused, [*began[2:], "--model", "llama3.2-1b"])[0]
    assert code == 2 and "another model" in said


def test_weights_are_loaded_one_after_the_other(published):
    """`load_weights` is the counterpart of `init_weights`: the same face, every parameter once."""
    weights = open_weights(published["scaled"][0])
    model = Llama(weights.config)
    written = []
    load_weights(
        model, weights, lambda parameter, stored: written.append((tuple(parameter.shape), tuple(stored.shape)))
    )
    assert written == [(tuple(p.shape),) * 2 for p in model.parameters()]
    init_weights(model, 0)
    before = model.norm.weight.clone()
    load_weights(model, weights)
    assert not torch.equal(model.norm.weight, before)
