"""The model's arithmetic, its rotary tables, its initialisation, its learning rate: against published values."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import fabric_train
from llama import PRESETS, Llama, LlamaConfig, init_weights
from llama.generate import sample_ids
from llama.model import rope_frequencies, rope_tables

PUBLISHED = {
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama2-7b": 6_738_415_616,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts(name):
    config = LlamaConfig.preset(name)
    with torch.device("meta"):
        model = Llama(config)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == config.parameters == PUBLISHED.get(name, counted)
    assert not list(model.buffers())


def test_flops_per_token():
    assert LlamaConfig.preset("llama3.1-8b").flops_per_token(8192) == pytest.approx(5.791e10, rel=1e-3)
    tied = LlamaConfig.preset("llama3.2-1b")
    assert tied.flops_per_token(8192) == replace(tied, tied_embeddings=False).flops_per_token(8192)


def test_rope_scaling_of_llama_3():
    f = rope_frequencies(LlamaConfig.preset("llama3.1-8b"))
    plain = rope_frequencies(LlamaConfig.preset("llama3-8b"))
    assert torch.equal(f[:29], plain[:29]) and torch.allclose(f[35:], plain[35:] / 8, rtol=1e-6, atol=0)
    assert f[29].item() == pytest.approx(2.166571e-03, rel=1e-6) and f[-1].item() == pytest.approx(
        3.068926e-07, rel=1e-6
    )
    assert (f[29:35] < plain[29:35]).all() and (f[29:35] > plain[29:35] / 8).all()
    g = rope_frequencies(LlamaConfig.preset("llama3.2-1b"))
    unscaled = 500_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert torch.allclose(g[:15].double(), unscaled[:15], rtol=1e-6, atol=0)
    assert torch.allclose(g[18:].double(), unscaled[18:] / 32, rtol=1e-6, atol=0)
    assert g[15].item() == pytest.approx(1.290548e-03, rel=1e-6) and g[-1].item() == pytest.approx(
        9.418307e-08, rel=1e-6
    )


def test_rotary_tables_stay_fp32():
    """In bf16 8192 positions collapse to 897 values; the tables are fp32 whatever the default type."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        cos, sin = rope_tables(LlamaConfig.preset("llama3-8b"), torch.arange(8192))
    finally:
        torch.set_default_dtype(torch.float32)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (8192, 1, 64)
    angles = torch.arange(8192, dtype=torch.float64)
    assert torch.allclose(cos[:, 0, 0].double(), angles.cos(), atol=1e-6)
    assert len(torch.unique(sin[:, 0, 0])) > 8000


def explicit_llama(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
    """The same model written position by position, head by head, in float64: loops instead of tensor tricks."""
    c = model.config
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    inv = rope_frequencies(c).double()

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def turn(x, position):  # x (K,)
        half = c.head_dim // 2
        out = torch.empty_like(x)
        for k in range(half):
            angle = position * inv[k]
            out[k] = x[k] * angle.cos() - x[k + half] * angle.sin()
            out[k + half] = x[k + half] * angle.cos() + x[k] * angle.sin()
        return out

    x = w["tok_embeddings.weight"][tokens]  # (S, D)
    for layer in range(c.n_layers):
        p = f"layers.{layer}."
        h = norm(x, w[p + "attention_norm.weight"])
        q, k, v = (h @ w[p + f"attention.w{n}.weight"].T for n in "qkv")
        q, k, v = (t.view(len(tokens), -1, c.head_dim) for t in (q, k, v))
        heads = []
        for head in range(c.n_heads):
            kv = head // (c.n_heads // c.n_kv_heads)
            rows = []
            for i in range(len(tokens)):
                query = turn(q[i, head], i)
                scores = torch.stack([query @ turn(k[j, kv], j) for j in range(i + 1)]) / math.sqrt(c.head_dim)
                rows.append(scores.softmax(0) @ v[: i + 1, kv])
            heads.append(torch.stack(rows))
        x = x + torch.cat(heads, -1) @ w[p + "attention.wo.weight"].T
        h = norm(x, w[p + "ffn_norm.weight"])
        gate = h @ w[p + "feed_forward.w1.weight"].T
        up = h @ w[p + "feed_forward.w3.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[p + "feed_forward.w2.weight"].T
    head = w["tok_embeddings.weight"] if c.tied_embeddings else w["output.weight"]
    return norm(x, w["norm.weight"]) @ head.T


@pytest.mark.parametrize("tied", [False, True])
def test_model_equals_an_explicit_one(tied):
    config = LlamaConfig(50, 24, 2, 4, 2, 8, 40, rope_theta=100.0, tied_embeddings=tied)  # head_dim is not dim / heads
    model = Llama(config)
    init_weights(model, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())))  # distinct norms
    tokens = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(0))
    expected = explicit_llama(model, tokens[0])
    assert torch.allclose(model(tokens)[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_initial_weights_follow_their_specification():
    """The table in init_weights' docstring: standard deviations within 2%, means within their sampling error."""
    config = replace(LlamaConfig.preset("tiny"), dim=512, n_layers=3, vocab_size=2000)
    for tied in (False, True):
        model = Llama(replace(config, tied_embeddings=tied))
        cut = math.sqrt(1 - 2 * 3 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))
        for name, p in model.named_parameters():
            leaf = name.split(".")[-2]
            if "norm" in leaf:
                assert (p == 1).all()
                continue
            if leaf == "output" or (leaf == "tok_embeddings" and tied):
                std = cut * 512**-0.5
                assert p.abs().max() <= 3 * 512**-0.5 * (1 + 1e-6)
            elif leaf == "tok_embeddings":
                std = 1.0
            elif leaf in ("wo", "w2", "w3"):
                std = 0.02 / math.sqrt(2 * (int(name.split(".")[1]) + 1))
            else:
                assert leaf in ("wq", "wk", "wv", "w1")
                std = 0.02
            assert p.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name
    assert cut == pytest.approx(0.9866, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_first_loss_is_what_the_initialisation_implies(seed):
    """ln(V) + half the variance of the logits, on labels that the model cannot know: uniform ones."""
    model = Llama(LlamaConfig.preset("tiny"))
    init_weights(model, seed)
    tokens = torch.randint(0, 320, (16, 129), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert loss == pytest.approx(math.log(320) + 0.9733 / 2, abs=0.1)
    assert loss == pytest.approx(math.log(320) + logits.var().item() / 2, abs=0.1)


def test_weights_do_not_depend_on_other_parameters():
    shallow, deep = (Llama(replace(LlamaConfig.preset("tiny"), n_layers=n)) for n in (1, 3))
    for name, p in shallow.named_parameters():
        assert torch.equal(p, deep.get_parameter(name))
    init_weights(deep, 1)
    assert not torch.equal(shallow.layers[0].attention.wq.weight, deep.layers[0].attention.wq.weight)


def test_initialisation_needs_one_parameter_of_extra_memory():
    """Peak of CPU allocations inside init_weights, against the largest parameter in fp32."""
    from torch.profiler import ProfilerActivity, profile

    config = replace(LlamaConfig.preset("tiny"), vocab_size=40_000, tied_embeddings=True)
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device="cpu")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        init_weights(model, 0)
    now = peak = 0
    for event in sorted(
        (e for e in p.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        now += event.nbytes()
        peak = max(peak, now)
    largest = 40_000 * 128 * 4
    assert largest <= peak <= 1.01 * largest


HF = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def write_config(tmp_path, **changes):
    import json

    content = {key: value for key, value in (HF | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


def test_config_of_llama_3_2_1b(tmp_path):
    assert LlamaConfig.from_hf(write_config(tmp_path)) == LlamaConfig.preset("llama3.2-1b")
    # transformers 5 keeps theta and scaling together
    parameters = HF["rope_scaling"] | {"rope_theta": 500000.0}
    newer = write_config(tmp_path, rope_theta=None, rope_scaling=None, rope_parameters=parameters)
    assert LlamaConfig.from_hf(newer) == LlamaConfig.preset("llama3.2-1b")


@pytest.mark.parametrize(
    "changes, fragment",
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_key_value_heads": 5}, "multiple of n_kv_heads"),
        ({"vocab_size": "320"}, "whole number"),
        ({"num_attention_heads": 0, "head_dim": None}, "cannot be understood"),
        ({"num_hidden_layers": 2.0}, "whole number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": HF["rope_scaling"] | {"low_freq_factor": 4.0}}, "high_freq_factor > low_freq_factor"),
        ({"rms_norm_eps": -5}, "norm_eps"),
    ],
)
def test_configs_that_are_not_ours_are_refused(tmp_path, changes, fragment):
    with pytest.raises(ValueError, match=fragment):
        LlamaConfig.from_hf(write_config(tmp_path, **changes))


RATES = {  # step: rate, with lr 1, min_lr 0.1, W = 10, D = 110
    "cosine": {1: 0.1, 10: 1.0, 35: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 60: 0.55, 110: 0.1, 500: 0.1},
    "linear": {5: 0.5, 10: 1.0, 35: 0.775, 60: 0.55, 110: 0.1, 111: 0.1},
    "wsd": {10: 1.0, 60: 1.0, 90: 1.0, 100: 0.55, 110: 0.1},
    "constant": {5: 0.5, 10: 1.0, 60: 1.0, 110: 1.0, 500: 1.0},
}


@pytest.mark.parametrize("schedule", RATES)
def test_learning_rate(schedule):
    options = fabric_train.OptimizerOptions(lr=1.0, min_lr=0.1, warmup_steps=10, decay_steps=110, schedule=schedule)
    for step, rate in RATES[schedule].items():
        assert fabric_train.learning_rate(step, options, steps=37) == pytest.approx(rate, rel=1e-12)
    rest = fabric_train.OptimizerOptions(lr=1.0, warmup_steps=0, schedule=schedule)
    assert fabric_train.learning_rate(1, rest, steps=1000) == pytest.approx(1.0, abs=1e-2)


def test_weight_decay_is_for_matrices_only():
    model = Llama(LlamaConfig.preset("tiny"))
    decayed, others = fabric_train.make_optimizer(model, fabric_train.OptimizerOptions()).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(names[id(p)] for p in others["params"]) == sorted(n for n in names.values() if "norm" in n)
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_sampling_goes_on_from_the_last_id():
    """A model that always follows k by k + 1 mod 7, with junk on every other position."""

    def logits_of(tokens):
        following = F.one_hot((tokens + 1) % 7, 10).float() * 50
        following[..., 9] = 100  # an id beyond the tokenizer's vocabulary: never drawn
        return following

    options = {"new_tokens": 20, "context": 8, "vocab_size": 9}
    expected = [(3 + i) % 7 for i in range(20)]
    assert sample_ids(logits_of, [0, 1, 2], temperature=0.0, **options) == expected
    assert sample_ids(logits_of, [0, 1, 2], temperature=0.5, **options) == expected


def test_sampling_ends_where_the_logits_are_not_finite():
    assert sample_ids(lambda t: torch.full((1, 8, 9), torch.nan), [1], new_tokens=5, context=8, vocab_size=9) == []
