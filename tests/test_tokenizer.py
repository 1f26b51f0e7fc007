"""Tokenizers: ids, special tokens, and files that other tools read."""

import base64
import json
import random
from pathlib import Path

import jobs
import pytest
import torch

from data import ByteTokenizer, TokenDataset, load_tokenizer, prepare_documents

TEXTS = [
    "",
    "import os\n",
    "naïve Ωμέγα 日本語 🦙\x00\x7f\xa0",
    " <|begin_of_text|> <|end_of_text|> <|eot_id|>",
    "  \t\n\n  x",
]


@pytest.fixture(scope="module")
def json_file(tmp_path_factory):
    """A tokenizer.json as Llama 3 has it: byte-level BPE, special tokens, the begin token put first by a template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the llama walks over the high plain of the andes"] * 9, trainer)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    begin = tokenizer.token_to_id(names[0])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{names[0]} $A", special_tokens=[(names[0], begin)]
    )
    folder = tmp_path_factory.mktemp("json")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": names[0]}, "eos_token": names[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    """A tokenizer.model as Llama 3 has it, with five merges."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"ll", b"am", b"llam", b"llama", b" llama"]
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return path


@pytest.mark.parametrize("kind", ["bytes", "json", "model"])
def test_text_comes_back_and_never_spells_a_special_token(kind, json_file, model_file):
    source = {"bytes": "bytes", "json": json_file, "model": model_file}[kind]
    tokenizer = load_tokenizer(source)
    special = {tokenizer.begin_id, tokenizer.end_id}
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not special & set(ids) and all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode([tokenizer.begin_id, *ids, tokenizer.end_id]) == text
    assert len(special) == 2 and max(special) < tokenizer.vocab_size


def test_llama_3_ids(model_file):
    """Merges by rank within the pattern's words; 256 special tokens behind them, in their published order."""
    tokenizer = load_tokenizer(model_file)
    assert tokenizer.encode("llama llama llam3") == [259, 260, ord(" "), 258, ord("3")]
    assert tokenizer.vocab_size == 261 + 256
    assert (tokenizer.begin_id, tokenizer.end_id) == (261, 262)  # 128000 and 128001 of the published 128256
    inner = tokenizer._tokenizer._special_tokens
    published = {
        "<|start_header_id|>": 6,
        "<|end_header_id|>": 7,
        "<|eom_id|>": 8,
        "<|eot_id|>": 9,
        "<|python_tag|>": 10,
    }
    assert {name: inner[name] - 261 for name in published} == published
    assert inner["<|reserved_special_token_247|>"] == 261 + 255
    # digits in threes, letters with one leading space, as the published pattern splits
    assert tokenizer.encode("12345") == [*b"123", *b"45"]


def test_very_long_runs(model_file):
    tokenizer = load_tokenizer(model_file)
    text = "x" * 60_000 + " " * 60_000 + "llama " * 100_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def llama_models_tokenizer():
    """Meta's own package, its tokenizer and the file that it ships."""
    from llama_models.llama3 import tokenizer

    return tokenizer.Tokenizer.get_instance(), Path(tokenizer.__file__).parent / "tokenizer.model"


@pytest.mark.parametrize("seed", range(8))
def test_long_runs_are_cut_as_meta_cuts_them(seed):
    """Texts of runs around the limits, at random places."""
    theirs, file = llama_models_tokenizer()
    ours = load_tokenizer(file)
    rng = random.Random(seed)
    lengths = [1, 2, 30, 24_999, 25_000, 25_001, 26_000, 50_000, 50_001, 75_003]
    text = "".join(rng.choice(["\n", " ", "a", "ab é", "7"]) * rng.choice(lengths) for _ in range(12))
    assert ours.encode(text) == theirs.encode(text, bos=False, eos=False)


def test_ids_of_the_standard_library_are_metas():
    """Every document, and text that spells special tokens."""
    from data.prepare import standard_library_documents

    theirs, file = llama_models_tokenizer()
    ours = load_tokenizer(file)
    assert (ours.vocab_size, ours.begin_id, ours.end_id) == (128256, 128000, 128001)
    documents = [*standard_library_documents(), *TEXTS, "<|begin_of_text|><|eot_id|>"]
    assert len(documents) > 500
    for text in documents:
        assert ours.encode(text) == theirs.encode(text, bos=False, eos=False)


def test_settings_for_batches_are_not_followed(json_file, tmp_path):
    """Truncation and padding in a published file would cut documents short, or fill them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(json_file))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(tmp_path / "mine.json"))
    ours = load_tokenizer(tmp_path / "mine.json")
    for text in TEXTS:
        assert ours.encode(text) == load_tokenizer(json_file).encode(text)
    (tmp_path / "out").mkdir()
    (tmp_path / "tokenizer.json").write_text("another")
    ours.save(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "mine.json").read_bytes()


def test_without_a_template_nothing_begins_a_text(json_file, tmp_path):
    """As with transformers: a named bos_token alone puts nothing first."""
    content = json.loads(json_file.read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.begin_id is None and tokenizer.end_id is not None
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json cannot be understood"):
        load_tokenizer(tmp_path)


def test_bytes_as_a_tokenizer_json(tmp_path):
    """The file that a byte-level model is exported with gives transformers the same ids."""
    from transformers import AutoTokenizer

    ours = ByteTokenizer()
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS[:3]:
        assert theirs(text).input_ids == [256, *text.encode()]
        assert theirs.decode([256, *text.encode(), 257], skip_special_tokens=True) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (256, 257, 258)
    again = load_tokenizer(tmp_path)
    assert (again.begin_id, again.end_id, again.vocab_size) == (256, 257, 258)
    assert all(again.encode(text) == ours.encode(text) for text in TEXTS)


def test_refused(tmp_path, model_file):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")  # SentencePiece
    with pytest.raises(ValueError, match=r"is not a tiktoken file .* SentencePiece .* use the tokenizer.json"):
        load_tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.model").write_text(model_file.read_text() + "eHg= 7\n")
    with pytest.raises(ValueError, match="ranks are not"):
        load_tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.model").write_text("YQ== 0\nYg== 1\n")
    with pytest.raises(ValueError, match="lacks some of the 256 single bytes"):
        load_tokenizer(tmp_path / "tokenizer.model")


@pytest.mark.parametrize("kind", ["json", "model"])
def test_a_token_folder_keeps_its_tokenizer(kind, json_file, model_file, tmp_path, group):
    tokenizer = load_tokenizer({"json": json_file, "model": model_file}[kind])
    documents = [f"llama number {i} eats <|end_of_text|> grass" for i in range(200)]
    folder = prepare_documents(documents, tmp_path / "tokens", tokenizer)
    dataset = TokenDataset(folder, 16)
    assert dataset.index["vocab_size"] == tokenizer.vocab_size
    ids = torch.cat([dataset[i][0] for i in range(len(dataset))]).tolist()
    first = [tokenizer.begin_id, *tokenizer.encode(documents[0]), tokenizer.end_id]
    assert ids[: len(first)] == first or ids[0] == tokenizer.begin_id
    assert dataset.tokenizer.encode(documents[0]) == tokenizer.encode(documents[0])
    held_out = TokenDataset(folder, 16, "validation")
    total = sum(ids.count(i) for i in (tokenizer.begin_id,)) + held_out.index["splits"]["validation"]["documents"]
    assert total == pytest.approx(200, abs=1)  # begun once each; the last window may be cut off

    # a vocabulary smaller than the tokenizer's is refused; a run's checkpoints carry the files
    code, said = jobs_refused(group, folder, tmp_path / "none", vocab_fits=kind == "json")
    if kind == "model":
        assert code == 2 and "vocabulary of 517" in said and "320" in said
    else:
        assert code == 0
        carried = tmp_path / "none" / "checkpoints" / "step-00000001" / "assets" / "tokenizer.json"
        assert carried.read_bytes() == json_file.read_bytes()
    (folder / json_file.name if kind == "json" else folder / model_file.name).write_text("changed")
    with pytest.raises(ValueError, match=r"is damaged: its sha256"):
        TokenDataset(folder, 16)


def jobs_refused(group, folder, out, vocab_fits: bool):
    call = ["--data.path", str(folder), "--out", str(out), "--steps", "1", "--data.sequence_length", "16"]
    call += ["--data.global_batch_size", "2", "--log.samples_every", "-1"]
    if not vocab_fits:
        return group.run(1, jobs.refused, call)[0]
    group.run(1, jobs.training, call)
    return 0, ""
