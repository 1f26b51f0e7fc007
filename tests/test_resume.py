"""Stop, resume, and get what the undisturbed run gets."""

import json
import shutil

import jobs
import numpy as np
import pytest
import torch
from test_mesh import train_arguments
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import checkpoints
import data

BATCH = 32
TWENTY = {
    "steps": 20,
    "data.global_batch_size": BATCH,
    "data.micro_batch_size": 4,
    "optimizer.schedule": "cosine",
    "optimizer.decay_steps": 20,
    "optimizer.warmup_steps": 4,
    "checkpoints.every": 10,
    "checkpoints.keep_last": -1,
    "checkpoints.keep_every": 10,
}


def run(group, tokens, out, mesh, **options) -> list[dict]:
    arguments = train_arguments(
        out, tokens, **TWENTY | {"parallel.data": mesh[0], "parallel.tensor": mesh[1]} | options
    )
    return group.run(mesh[0] * mesh[1], jobs.training, arguments)


def ids_by_step(results: list[dict], mesh: tuple[int, int]) -> list[list]:
    """For each step the (sample, digest of its ids) of the whole global batch, in the order of samples."""
    share = BATCH // mesh[0]
    ranks = [results[d * mesh[1]]["given"] for d in range(mesh[0])]
    return [sorted(pair for rank in ranks for pair in rank[i : i + share]) for i in range(0, len(ranks[0]), share)]


def tensors(checkpoint, tmp_path) -> dict[str, torch.Tensor]:
    """Every tensor of a distributed checkpoint, model and optimizer, by its path."""
    dcp_to_torch_save(checkpoint, tmp_path / "one.pt")
    flat = {}

    def walk(prefix, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}/{key}", inner)
        elif isinstance(value, torch.Tensor):
            flat[prefix] = value

    walk("", torch.load(tmp_path / "one.pt", weights_only=True))
    return flat


@pytest.fixture(scope="module")
def undisturbed(group, tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    return out, run(group, tokens, out, (2, 2))


@pytest.fixture(scope="module")
def stopped(group, tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped") / "run"
    return out, run(group, tokens, out, (2, 2), steps=10)


def test_the_run_crosses_an_epoch_border(tokens):
    windows = len(data.TokenDataset(tokens, jobs.LENGTH))
    assert 10 * BATCH % windows != 0  # the stop is inside an epoch
    assert windows < 20 * BATCH - BATCH  # and an epoch ends after it or before it


@pytest.mark.parametrize("mesh", [(2, 2), (1, 1), (4, 1), (1, 2)], ids=str)
def test_twenty_steps_are_ten_and_ten(group, tokens, undisturbed, stopped, tmp_path, mesh):
    out, whole = undisturbed
    shutil.copytree(stopped[0], tmp_path / "run")
    resumed = run(group, tokens, tmp_path / "run", mesh)
    assert ids_by_step(stopped[1], (2, 2)) == ids_by_step(whole, (2, 2))[:10]
    assert ids_by_step(resumed, mesh) == ids_by_step(whole, (2, 2))[10:]
    rows, expected = resumed[0]["rows"], whole[0]["rows"]
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 21)]
    assert [row["lr"] for row in rows] == [row["lr"] for row in expected]

    found = tensors(checkpoints.latest(tmp_path / "run" / "checkpoints"), tmp_path)
    reference = tensors(checkpoints.latest(out / "checkpoints"), tmp_path)
    assert found.keys() == reference.keys()
    assert len([name for name in found if name.startswith("/optimizer/state")]) >= 2 * 21
    for column in ("loss", "grad_norm"):
        if mesh == (2, 2):
            assert [row[column] for row in rows] == [row[column] for row in expected]  # to the last digit
        else:
            np.testing.assert_allclose(
                [float(row[column]) for row in rows], [float(row[column]) for row in expected], rtol=1e-5
            )
    for name, tensor in reference.items():
        if mesh == (2, 2):
            assert torch.equal(found[name], tensor), name
        else:
            # AdamW divides by the root of tiny second moments: single weights may differ more than the losses do
            error = (found[name].double() - tensor.double()).norm()
            assert error <= 1e-4 * tensor.double().norm(), name


def test_state_generators_and_configuration_come_back(group, tmp_path):
    answers = group.run(2, jobs.optimizer_and_generators, str(tmp_path / "checkpoints"))
    for answer in answers:
        assert answer["progress"] == {"step": 1, "samples": 4, "tokens": 128}
        assert answer["weights equal"] and answer["one step on equal"]
        assert answer["drawn"] == answer["redrawn"]
        assert answer["decays"] == [0.3, 0.0]  # the new configuration's
        assert answer["step counters"] == {1.0}
    assert answers[0]["drawn"] != answers[1]["drawn"]  # each rank has its own


def test_newest_complete_checkpoint_is_found(tmp_path, stopped):
    folder = tmp_path / "checkpoints"
    assert checkpoints.latest(folder) is None
    complete = checkpoints.latest(stopped[0] / "checkpoints")
    for name in ("step-00000900", "step-00001000", "step-123456789"):
        shutil.copytree(complete, folder / name)
    for name in (".step-00002000.partial", "step-00003000.bak", "step-5", "step-99999999"):
        shutil.copytree(complete, folder / name)
    (folder / "step-99999999" / "manifest.json").unlink()  # a folder without a manifest is not complete
    assert checkpoints.latest(folder).name == "step-123456789"
    assert [step for step, _ in checkpoints.steps(folder)] == [900, 1000, 123456789]


def test_retirement_keeps_what_was_asked_for(tmp_path):
    for step in range(10, 80, 10):
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        (path / "manifest.json").write_text("{}")
    checkpoints.retire(tmp_path, keep_last=-1, keep_every=0)
    assert len(checkpoints.steps(tmp_path)) == 7
    checkpoints.retire(tmp_path, keep_last=2, keep_every=30, source=tmp_path / "step-00000010")
    assert [step for step, _ in checkpoints.steps(tmp_path)] == [10, 30, 60, 70]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{s:08d}" for s in (10, 30, 60, 70)]


def test_manifest_describes_every_file(stopped):
    path = checkpoints.latest(stopped[0] / "checkpoints")
    manifest = checkpoints.verify(path)
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == files >= {".metadata", "meta.pt"}
    assert (manifest["step"], manifest["tokens"]) == (10, 10 * BATCH * jobs.LENGTH)
    assert manifest["mesh"] == {"data": 2, "tensor": 2}
    assert len(manifest["data"]["fingerprint"]) == 16


@pytest.mark.parametrize("damage", ["flip a bit", "cut a byte", "remove"])
@pytest.mark.parametrize("kind", ["*.distcp", ".metadata", "meta.pt"])
def test_damage_is_found(tmp_path, stopped, kind, damage):
    shutil.copytree(checkpoints.latest(stopped[0] / "checkpoints"), tmp_path / "step-00000010")
    file = next((tmp_path / "step-00000010").glob(kind))
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        if damage == "flip a bit":
            content[len(content) // 2] ^= 1
        else:
            del content[-1]
        file.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=file.name):
        checkpoints.verify(tmp_path / "step-00000010")


def test_no_wrapper_leaves_its_name_on_disk(stopped, tmp_path):
    names = tensors(checkpoints.latest(stopped[0] / "checkpoints"), tmp_path)
    for mark in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp", "_forward_module"):
        assert not [name for name in names if mark in name]
    assert "/model/layers.0.attention.wq.weight" in names


def test_another_model_or_other_data_is_refused(group, tokens, stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    for changed, fragments in (
        ({"seed": 4}, ["other data", "another data", "seed is 3 there, 4 here"]),
        ({"data.sequence_length": 32}, ["sequence_length is 64 there, 32 here"]),
        ({"model": "llama2-7b"}, ["another model", "n_layers is 2 there, 32 here"]),
    ):
        arguments = train_arguments(tmp_path / "run", tokens, **TWENTY | changed)
        code, message = group.run(1, jobs.refused, arguments)[0]
        assert code == 2
        assert any(fragment in message for fragment in fragments), message
        assert len(message.splitlines()) == 1
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before


def test_damaged_newest_checkpoint_is_refused(group, tokens, stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints" / "step-00000010").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    code, message = group.run(1, jobs.refused, train_arguments(tmp_path / "run", tokens, **TWENTY))[0]
    assert code == 2 and file.name in message and "is damaged" in message


def test_manifest_of_a_later_version_is_refused(stopped, tmp_path):
    shutil.copytree(checkpoints.latest(stopped[0] / "checkpoints"), tmp_path / "step-00000010")
    file = tmp_path / "step-00000010" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 9}))
    with pytest.raises(ValueError, match="version 9"):
        checkpoints.verify(tmp_path / "step-00000010")


def test_going_on_from_an_earlier_step_needs_another_folder(group, tokens, undisturbed, tmp_path):
    """In the same folder the newest by step would be the old branch's: two runs would be glued together."""
    shutil.copytree(undisturbed[0], tmp_path / "run")
    earlier = tmp_path / "run" / "checkpoints" / "step-00000010"
    arguments = train_arguments(tmp_path / "run", tokens, **TWENTY | {"resume": earlier})
    code, message = group.run(1, jobs.refused, arguments)[0]
    assert code == 2 and "is of step 10" in message and "checkpoint of step 20" in message
    rows = run(group, tokens, tmp_path / "branch", (1, 1), resume=earlier)[0]["rows"]
    assert [row["step"] for row in rows] == [str(step) for step in range(11, 21)]


def test_never_sees_checkpoints_without_metrics(group, tokens, stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    (tmp_path / "run" / "metrics.csv").unlink()
    arguments = train_arguments(tmp_path / "run", tokens, **TWENTY | {"resume": "never"})
    code, message = group.run(1, jobs.refused, arguments)[0]
    assert code == 2 and "is in use" in message


@pytest.mark.parametrize(
    "change", [{"model": None}, {"model": 3}, {"step": "x"}, {"files": {}}, {"files": {"../x": {}, ".metadata": {}}}]
)
def test_manifest_that_is_not_whole_is_refused(stopped, tmp_path, change):
    shutil.copytree(checkpoints.latest(stopped[0] / "checkpoints"), tmp_path / "step-00000010")
    file = tmp_path / "step-00000010" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"manifest.json is damaged"):
        checkpoints.verify(tmp_path / "step-00000010")


def test_leftovers_of_killed_saves_are_swept(group, tokens, stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    for name in (".step-00000020.partial", ".step-00000004.deleted"):
        (folder / name).mkdir()
        (folder / name / "junk").write_text("")
    run(group, tokens, tmp_path / "run", (1, 1))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010", "step-00000020"]
