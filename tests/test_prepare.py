"""`python -m data prepare`: every kind of source, the same bytes whatever the workers, whole or not at all."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import data.prepare
import data.read
from data import ByteTokenizer, TokenDataset, fingerprint, load_tokenizer, read_index
from data.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [f"Zeile {i}: ü 日本 🦙\n\nund noch {'eine ' * (i % 7)}\n" for i in range(60)]
LINES = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in DOCUMENTS)


def prepare(out: Path, *sources: object, **options: object) -> int:
    named = {"tokenizer": "bytes"} | options
    return main(
        ["prepare", *map(str, sources), "--out", str(out), *(w for n, v in named.items() for w in (f"--{n}", str(v)))]
    )


def texts(folder: Path) -> list[str]:
    """Every document of a folder made with the byte tokenizer, sorted."""
    found = []
    for split in ("train", "validation"):
        dataset = TokenDataset(folder, 1, split)
        ids = dataset.read(0, dataset.tokens)
        parts = np.split(ids, np.flatnonzero(ids == 257) + 1)[:-1]
        assert all(part[0] == 256 and (part == 256).sum() == 1 for part in parts)
        found += [ByteTokenizer().decode(part) for part in parts]
    return sorted(found)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_kind(kind: str, folder: Path) -> list[object]:
    """The documents in one kind of file; the sources to give."""
    folder.mkdir()
    if kind == "folder":
        for i, text in enumerate(DOCUMENTS):
            path = folder / "deep" / f"{i % 3}" / f"{i}{['.txt', '.md', '.py'][i % 3]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (folder / "picture.png").write_bytes(b"\x89PNG")
        (folder / ".hidden.txt").write_text("no")
        return [folder]
    if kind == "jsonl.gz":
        with gzip.open(folder / "a.jsonl.gz", "wt") as file:
            file.write(LINES)
    elif kind == "jsonl.zst":
        import zstandard

        half = len(LINES.encode()) // 2
        parts = [LINES.encode()[:half], LINES.encode()[half:]]  # two frames, as parallel compressors write them
        (folder / "a.jsonl.zst").write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in parts))
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": DOCUMENTS, "n": range(60)}), folder / "a.parquet", row_group_size=7)
    else:
        (folder / "a.jsonl").write_text(LINES)
    return list(folder.iterdir())


@pytest.mark.parametrize("kind", ["folder", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "hf", "stdin"])
def test_every_kind_gives_the_same_documents(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data.read, "PART_BYTES", 500)  # many parts also of a small text
    sources = write_kind(kind, tmp_path / "in")
    if kind == "hf":
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        sources = [f"hf:{tmp_path / 'in'}"]
    if kind == "stdin":
        sources = ["-"]
        monkeypatch.setattr(data.__main__, "standard_input", lambda: io.BytesIO(LINES.encode()))
    extra = {"stdin": "jsonl"} if kind == "stdin" else {}
    outs = [tmp_path / f"out{workers}" for workers in (1, 3)]
    for workers, out in zip((1, 3), outs, strict=True):
        assert prepare(out, *sources, workers=workers, **extra) == 0, capsys.readouterr().err
        assert texts(out) == sorted(DOCUMENTS)
    assert contents(outs[0]) == contents(outs[1])
    splits = read_index(outs[0])["splits"]
    assert sum(split["documents"] for split in splits.values()) == 60
    assert sum(split["text_bytes"] for split in splits.values()) == sum(len(text.encode()) for text in DOCUMENTS)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("given", ["file", "stdin"])
def test_one_large_text_is_one_document(given, tmp_path, monkeypatch):
    """Cut into parts at line ends, it gives the ids of the whole text; its end is held out."""
    from test_tokenizer import llama_models_tokenizer

    theirs, file = llama_models_tokenizer()
    monkeypatch.setattr(data.read, "PART_BYTES", 3000)
    text = Path(json.__file__).with_name("decoder.py").read_text() + "ünd 日本 " * 3000  # 30 kB without a line end
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(data.__main__, "standard_input", lambda: io.BytesIO(text.encode()))
    source = tmp_path / "a.txt" if given == "file" else "-"
    assert prepare(tmp_path / "out", source, tokenizer=file, workers=2) == 0
    datasets = [TokenDataset(tmp_path / "out", 1, split) for split in ("train", "validation")]
    ids = np.concatenate([dataset.read(0, dataset.tokens) for dataset in datasets]).tolist()
    assert (ids[0], ids[-1]) == (128000, 128001) and {128000, 128001}.isdisjoint(ids[1:-1])
    assert load_tokenizer(file).decode(ids) == text
    lines = len(text[: text.rindex("\n")])
    whole = theirs.encode(text[:lines], bos=True, eos=False)
    assert ids[: len(whole) - 5] == whole[:-5]  # up to the run without a line end
    assert datasets[1].tokens == int(len(ids) * 0.02)


def test_large_texts_are_held_out_whole(tmp_path, monkeypatch):
    """Of 200 documents in several parts each, about a fifth is held out, none of them cut."""
    monkeypatch.setattr(data.read, "PART_BYTES", 100)
    monkeypatch.setattr(data.read, "_KEY_BYTES", 30)
    (tmp_path / "in").mkdir()
    for i in range(200):
        (tmp_path / "in" / f"{i}.txt").write_text(f"document {i}\n" * 40)
    assert prepare(tmp_path / "out", tmp_path / "in", validation=0.2, workers=1) == 0
    assert texts(tmp_path / "out") == sorted(f"document {i}\n" * 40 for i in range(200))
    assert 20 < read_index(tmp_path / "out")["splits"]["validation"]["documents"] < 65


BAD = [
    (b'{"text": "a"\n', "it is not JSON"),
    (b'["a"]\n', "it is not a JSON object"),
    (b'{"body": "a"}\n', "it has no field 'text' (it has body)"),
    (b'{"text": 5}\n', "its field 'text' is no text but int"),
    (b'{"text": "\xff"}\n', "it is not JSON"),
    (b"[" * 100_000 + b"\n", "nested too deeply"),
]


@pytest.mark.parametrize("line, reason", BAD, ids=range(len(BAD)))
def test_malformed_lines_are_named(line, reason, tmp_path, monkeypatch, capsys):
    """By file and line, counted over parts; the run stops, or leaves them out and says so."""
    monkeypatch.setattr(data.read, "PART_BYTES", 300)
    good = LINES.encode().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join([*good[:40], b"\n", line, *good[40:]]))
    assert prepare(tmp_path / "out", tmp_path / "a.jsonl", workers=2) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {tmp_path}/a.jsonl, line 42: " in said and reason in said
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    assert prepare(tmp_path / "out", tmp_path / "a.jsonl", workers=2, on_bad="skip") == 0
    assert f"left out: {tmp_path}/a.jsonl, line 42: " in capsys.readouterr().err
    assert texts(tmp_path / "out") == sorted(DOCUMENTS)


def test_a_text_that_is_not_utf8_is_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    (tmp_path / "b.txt").write_text("good\n" * 50)
    assert prepare(tmp_path / "out", tmp_path, workers=1) == 2
    assert "a.txt, line 3: byte 11 is not UTF-8" in capsys.readouterr().err


def test_again_with_the_same_inputs_does_nothing(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(LINES)
    assert prepare(tmp_path / "out", tmp_path / "a.jsonl") == 0
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in contents(tmp_path / "out")}
    assert prepare(tmp_path / "out", tmp_path / "a.jsonl") == 0
    assert "is made from these inputs already" in capsys.readouterr().out
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before} == before
    (tmp_path / "a.jsonl").write_text(LINES + LINES)
    for options in ({}, {"text_field": "url"}, {"validation": 0.5}):
        assert prepare(tmp_path / "out", tmp_path / "a.jsonl", **options) == 2
        assert "made from other input: " in capsys.readouterr().err
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in before} == before


@pytest.mark.parametrize(
    "sources, options, fragment",
    [
        (["IN/none"], {}, "there is no file or folder"),
        (["IN"], {"validation": 0}, "--validation is 0.0"),
        (["IN"], {"workers": 0}, "--workers is 0"),
        (["IN"], {"tokenizer": "words"}, "there is no tokenizer words"),
        (["IN/empty.txt"], {}, "no text was found"),
        (["IN/a.parquet"], {}, "is not a Parquet file"),
        (["IN/only"], {}, "no file of a kind that is read"),
    ],
)
def test_wrong_calls(sources, options, fragment, tmp_path, capsys):
    folder = tmp_path / "in"
    (folder / "only").mkdir(parents=True)
    (folder / "only" / "x.png").write_bytes(b"")
    (folder / "empty.txt").write_text("")
    (folder / "a.parquet").write_text("no")
    assert prepare(tmp_path / "out", *(s.replace("IN", str(folder)) for s in sources), **options) == 2
    said = capsys.readouterr().err
    assert fragment in said and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_killed_twice_the_third_run_gives_the_same_bytes(tmp_path):
    """SIGKILL at two points of the writing; nothing that looks complete is left, and leftovers go."""
    (tmp_path / "a.jsonl").write_text(LINES * 6000)  # 30 MB
    call = [sys.executable, "-m", "data", "prepare", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--out"]
    undisturbed = tmp_path / "undisturbed" / "tokens"
    subprocess.run([*call, str(undisturbed)], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    expected = contents(undisturbed)
    whole = sum(map(len, expected.values()))
    folder = tmp_path / "killed"
    for share in (0.2, 0.7):
        process = subprocess.Popen(
            [*call, str(folder / "tokens")], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + 60
        while sum(p.stat().st_size for p in folder.rglob("*.bin")) < share * whole:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (folder / "tokens").exists()
        with pytest.raises(FileNotFoundError):
            read_index(folder / "tokens")
    subprocess.run([*call, str(folder / "tokens")], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    assert contents(folder / "tokens") == expected
    assert [path.name for path in folder.iterdir()] == ["tokens"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_input(tmp_path):
    """The peak of the process that reads, splits and writes: 12 times the input, less than 1.3 times the memory."""
    peaks = []
    for copies in (1000, 12_000):
        (tmp_path / f"{copies}.jsonl").write_text(LINES * copies)  # 5 and 60 MB
        code = "import sys; from data.__main__ import main; main(sys.argv[1:])\n"
        code += "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
        call = ["prepare", str(tmp_path / f"{copies}.jsonl"), "--out", str(tmp_path / f"o{copies}"), "--workers", "1"]
        done = subprocess.run(
            [sys.executable, "-c", code, *call, "--tokenizer", "bytes"], cwd=ROOT, check=True, capture_output=True
        )
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    size = (tmp_path / "o12000" / "train-00000.bin").stat().st_size / 2**20
    assert size > 60 and peaks[1] < 1.3 * peaks[0] + 20, peaks


def test_shards_are_cut_at_a_fixed_number_of_ids(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(LINES)
    assert prepare(tmp_path / "one", tmp_path / "a.jsonl") == 0
    monkeypatch.setattr(data.prepare, "SHARD_TOKENS", 100)
    assert prepare(tmp_path / "many", tmp_path / "a.jsonl") == 0
    one, many = (TokenDataset(tmp_path / name, 64) for name in ("one", "many"))
    sizes = [shard["tokens"] for shard in many.index["splits"]["train"]["shards"]]
    assert len(sizes) > 20 and set(sizes[:-1]) == {100} and 0 < sizes[-1] <= 100
    assert all((one[i][0] == many[i][0]).all() for i in range(len(one)))


def test_inspect(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_text(LINES)
    assert prepare(tmp_path / "out", tmp_path / "a.jsonl") == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--documents", "2"]) == 0
    said = capsys.readouterr().out
    index = read_index(tmp_path / "out")
    assert fingerprint(index) in said and f"train {index['splits']['train']['documents']} documents" in said
    first = next(text for text in DOCUMENTS if text in texts(tmp_path / "out"))
    assert "[document 1," in said and first.splitlines()[0] in said
    monkeypatch.setattr(data.tokens, "_HASH_UP_TO", 10)  # as if it were large
    assert main(["inspect", str(tmp_path / "out"), "--verify"]) == 0
    content = bytearray((tmp_path / "out" / "train-00000.bin").read_bytes())
    content[100] ^= 1
    (tmp_path / "out" / "train-00000.bin").write_bytes(content)
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert main(["inspect", str(tmp_path / "out"), "--verify"]) == 2
    assert "train-00000.bin is damaged: its sha256" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "there is no token folder" in capsys.readouterr().err


def nano_files(folder: Path) -> None:
    """What a nanoGPT-style script leaves: nothing but ids."""
    np.arange(5000, dtype="<u2").tofile(folder / "train.bin")
    np.arange(900, dtype="<u2").tofile(folder / "val.bin")


def test_adopted_files(group, tmp_path, capsys):
    import jobs

    nano_files(tmp_path)
    call = ["adopt", "--train", f"{tmp_path}/train.bin", "--validation", f"{tmp_path}/val.bin", "--dtype", "uint16"]
    assert main([*call, "--vocab_size", "5000", "--out", f"{tmp_path}/out"]) == 0
    dataset = TokenDataset(tmp_path / "out", 100)
    assert dataset[7][0].tolist() == list(range(700, 800)) and dataset.tokenizer is None
    assert main(["inspect", f"{tmp_path}/out"]) == 0 and "first ids: [0, 1, 2" in capsys.readouterr().out
    for changed, fragment in (
        (["--vocab_size", "4000"], "train.bin: token 4,000 is 4000, outside the vocabulary of 4,000"),
        (["--vocab_size", "70000", "--dtype", "uint32"], "outside the vocabulary of 70,000"),
        (["--vocab_size", "5000", "--tokenizer", "tokenizer.none"], "there is no tokenizer"),
        (["--vocab_size", "5000", "--train", f"{tmp_path}/gone.bin"], "there is no file"),
    ):
        assert main([*call, "--out", f"{tmp_path}/again", *changed]) == 2
        assert fragment in capsys.readouterr().err
    (tmp_path / "train.bin").write_bytes(b"123")
    assert main([*call, "--vocab_size", "5000", "--out", f"{tmp_path}/again"]) == 2
    assert "no whole number of ids of 2 bytes" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()

    # a run on ids whose text is unknown: a loss, but neither bits a byte nor samples
    np.random.default_rng(0).integers(0, 320, 5000).astype("<u2").tofile(tmp_path / "train.bin")
    np.random.default_rng(1).integers(0, 320, 900).astype("<u2").tofile(tmp_path / "val.bin")
    assert main([*call, "--vocab_size", "320", "--out", f"{tmp_path}/small"]) == 0
    call = ["--data.path", f"{tmp_path}/small", "--out", f"{tmp_path}/run", "--steps", "1"]
    call += ["--data.sequence_length", "64", "--data.global_batch_size", "4"]
    rows = group.run(1, jobs.training, call)[0]["rows"]
    assert float(rows[0]["validation_loss"]) > 5 and rows[0]["validation_bits_per_byte"] == ""
    assert not (tmp_path / "run" / "samples.md").exists()
