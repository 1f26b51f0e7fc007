"""Generation: the cache changes nothing, sampling draws what it says, and every kind of source gives the same text."""

import math
import shutil
from pathlib import Path

import jobs
import pytest
import torch
from test_hf import SCALED, random_hf, retensor

import checkpoints
from checkpoints.convert import from_hf, to_hf
from data import ByteTokenizer
from llama import load_hf
from llama.__main__ import main
from llama.generate import Decoder, choose, generate

PROMPTS = [[256, 7, 8, 9], [256], [256, *range(100)], [3, 4]]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / "hf"
    theirs = random_hf(folder, rope_parameters=SCALED)
    ByteTokenizer().save(folder)
    return folder, theirs


def greedy_without_cache(model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_logits_with_a_cache_are_those_without(published):
    """For prompts of different lengths in one batch, each step against the whole sequence run anew."""
    model = load_hf(published[0])
    decoder = Decoder(model, len(PROMPTS), 112)
    lengths = torch.tensor([len(p) for p in PROMPTS])
    rows = torch.full((len(PROMPTS), int(lengths.max())), 5)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    ids = [list(p) for p in PROMPTS]
    with torch.no_grad():
        logits = decoder.read_prompts(rows, lengths)
        for step in range(8):
            for b, row in enumerate(ids):
                assert torch.allclose(logits[b], model(torch.tensor([row]))[0, -1], rtol=1e-5, atol=1e-5)
                row.append((7 * step + b) % 320)
            logits = decoder.step(torch.tensor([row[-1] for row in ids]), lengths + step)


def test_a_batch_is_its_rows(published):
    folder, theirs = published
    model = load_hf(folder)
    steps = list(generate(model, PROMPTS, max_new_tokens=12, temperature=0))
    assert len(steps) == 12
    for prompt, row in zip(PROMPTS, zip(*steps, strict=True), strict=True):
        assert list(row) == greedy_without_cache(model, prompt, 12)
    prompt = torch.tensor([PROMPTS[0]])
    reference = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    assert next(zip(*steps, strict=True)) == tuple(reference[0, len(PROMPTS[0]) :].tolist())


def test_rows_stop_before_an_end_token(published):
    model = load_hf(published[0])
    free = [greedy_without_cache(model, prompt, 12) for prompt in PROMPTS]
    stop = free[0][4]
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    steps = list(generate(model, PROMPTS, max_new_tokens=12, temperature=0, stop_ids={stop}))
    rows = [[i for i in row if i is not None] for row in zip(*steps, strict=True)]
    assert rows == expected and len(rows[0]) <= 4
    assert not list(generate(model, [PROMPTS[0]], max_new_tokens=9, temperature=0, stop_ids=set(range(320))))


def test_ids_beyond_the_tokenizer_are_never_drawn(published):
    model = load_hf(published[0])
    drawn = [i for step in generate(model, PROMPTS, max_new_tokens=30, temperature=5.0, vocab_size=10) for i in step]
    assert len(drawn) == 120 and set(drawn) == set(range(10))


P = [0.5, 0.3, 0.15, 0.05]


@pytest.mark.parametrize(
    "temperature, top_k, top_p, expected",
    [
        (1.0, 0, 1.0, P),
        (1.0, 2, 1.0, [0.625, 0.375, 0, 0]),
        (1.0, 0, 0.7, [0.625, 0.375, 0, 0]),
        (1.0, 0, 0.81, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (1.0, 0, 0.01, [1, 0, 0, 0]),
        (0.5, 0, 1.0, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),  # squares
        (1.0, 3, 0.6, [0.625, 0.375, 0, 0]),  # of 0.526, 0.316, 0.158
        (0, 0, 1.0, [1, 0, 0, 0]),
    ],
)
def test_sampling_follows_its_distribution(temperature, top_k, top_p, expected):
    """20,000 draws; each frequency within five standard errors; excluded ids never. The ids stand shuffled."""
    order = [2, 0, 3, 1]
    logits = torch.tensor([math.log(P[i]) for i in order]).expand(20_000, 4)
    drawn = choose(logits, temperature, top_k, top_p, torch.Generator().manual_seed(0))
    for place, i in enumerate(order):
        found = (drawn == place).float().mean().item()
        assert abs(found - expected[i]) <= 5 * math.sqrt(expected[i] * (1 - expected[i]) / 20_000), i


def test_logits_that_are_not_finite(published):
    rows = torch.tensor([[1.0, torch.nan, 0.0], [0.0, 9.0, 0.0]])
    for temperature in (0.0, 1e-3):
        assert choose(rows, temperature, 0, 1.0, torch.Generator()).tolist() == [-1, 1]
    model = load_hf(published[0])
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        list(generate(model, [[1]], max_new_tokens=3))


def text(capsys, *call: str) -> str:
    assert main(["generate", *call]) == 0
    return capsys.readouterr().out


def test_the_command_gives_the_same_text_from_every_source(group, published, tokens, tmp_path, capsys):
    """A Hugging Face folder, a checkpoint of mesh (2, 2), its run folder, an import, an export."""
    folder, _ = published
    run = tmp_path / "run"
    group.run(
        4,
        jobs.training,
        [
            *("--init_from", str(folder), "--out", str(run), "--data.path", str(tokens), "--steps", "1"),
            *("--data.sequence_length", "64", "--data.global_batch_size", "4", "--optimizer.lr", "0"),
            *("--log.samples_every", "-1"),
        ],
    )
    newest = checkpoints.latest(run / "checkpoints")
    from_hf(folder, tmp_path / "imported")
    to_hf(newest, tmp_path / "exported")
    call = ["--prompt", "the llama", "--max_new_tokens", "20", "--top_k", "50", "--seed", "3"]
    texts = {
        str(source): text(capsys, str(source), *call)
        for source in (folder, newest, run, tmp_path / "imported", tmp_path / "exported")
    }
    assert len(set(texts.values())) == 1, texts
    first = next(iter(texts.values()))
    assert first.startswith("the llama") and len(first) > len("the llama") + 5
    assert text(capsys, str(folder), *call[:-1], "4") != first

    # several prompts in one batch, greedily: each as it is alone; what is streamed is what was decoded
    greedy = ["--max_new_tokens", "15", "--temperature", "0"]
    alone = [text(capsys, str(folder), "--prompt", prompt, *greedy) for prompt in ("the llama", "x")]
    both = text(capsys, str(folder), "--prompt", "the llama", "x", *greedy)
    assert both == f"[1] {alone[0]}\n[2] {alone[1]}\n"


def test_streaming_never_shows_half_a_character(published, capsys, monkeypatch):
    """Bytes come one at a time; what is printed in all is the text."""
    import llama.__main__ as command

    wanted = "é🦙z"
    monkeypatch.setattr(command, "generate", lambda *a, **k: ([byte] for byte in wanted.encode()))
    assert text(capsys, str(published[0]), "--prompt", "a") == f"a{wanted}\n"


def test_extreme_settings_draw_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    for temperature, top_p in ((1e-300, 1.0), (1e-38, 1.0), (1e-4, 0.5), (1.0, 1e-300)):
        assert choose(logits, temperature, 0, top_p, torch.Generator()).tolist() == [1, 0], (temperature, top_p)
    assert choose(logits, 1.0, 99, 1.0, torch.Generator()).shape == (2,)


@pytest.mark.parametrize(
    "said", ['{"eos_token_id": [[1]]}', '{"eos_token_id": {}}', '{"eos_token_id": "x"}', "[]", "{"]
)
def test_damaged_generation_configs(published, tmp_path, said, capsys):
    shutil.copytree(published[0], tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text(said)
    assert main(["generate", f"{tmp_path}/hf", "--prompt", "x"]) == 2
    assert "generation_config.json" in capsys.readouterr().err


def test_damaged_weights_end_with_a_message(published, tmp_path, capsys):
    import shutil

    shutil.copytree(published[0], tmp_path / "hf")
    retensor(tmp_path / "hf", lambda t: t["model.norm.weight"].fill_(torch.nan))
    assert main(["generate", f"{tmp_path}/hf", "--prompt", "x"]) == 2
    assert "logits are not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    "call, fragment",
    [
        (["SOURCE", "--prompt", "x", "--seed", "-1"], "--seed is -1"),
        (["SOURCE", "--prompt", "x", "--max_new_tokens", "1000000000000"], "--max_new_tokens is"),
        (["SOURCE", "--prompt", "\udcff"], "is not UTF-8"),
        (["SOURCE", "--prompt", "x", "--temperature", "-1"], "--temperature is -1.0"),
        (["SOURCE", "--prompt", "x", "--temperature", "nan"], "--temperature is nan"),
        (["SOURCE", "--prompt", "x", "--top_p", "0"], "--top_p is 0.0; it takes more than 0, at most 1"),
        (["SOURCE", "--prompt", "x", "--top_k", "-2"], "--top_k is -2"),
        (["SOURCE", "--prompt", "x", "--max_new_tokens", "0"], "--max_new_tokens is 0"),
        (["SOURCE", "--prompt", "x", "--device", "cuda"], "finds no CUDA device"),
        (["SOURCE/nothing", "--prompt", "x"], "there is no folder"),
        (["SOURCE", "--prompt", "x", "--tokenizer", "SOURCE/none.json"], "there is no tokenizer"),
    ],
)
def test_wrong_calls(published, call, fragment, capsys):
    assert main(["generate", *(word.replace("SOURCE", str(published[0])) for word in call)]) == 2
    assert fragment in capsys.readouterr().err


def test_a_tokenizer_must_fit(tmp_path, capsys):
    random_hf(tmp_path / "hf", vocab_size=256, bos_token_id=1, eos_token_id=2)
    assert main(["generate", f"{tmp_path}/hf", "--prompt", "x"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    assert main(["generate", f"{tmp_path}/hf", "--prompt", "x", "--tokenizer", "bytes"]) == 2
    assert "the tokenizer has 258 ids" in capsys.readouterr().err
    assert Path(tmp_path / "hf").is_dir()
