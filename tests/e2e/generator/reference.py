#!/usr/bin/env python3
"""End-to-end reference vectors for a DeepSeek-V4 cache: a tiny random model, run by transformers.

    reference.py --seed 1 --out seed1 [--schedule 0,4,128,4] [--hidden 64] [--topk 512] [--router hash]
                 [--prompt-len 300] [--new-tokens 40] [--batch 1] [--min-margin 0] [--tail 128] [--released] [--plain]

Writes into --out: `config.json` and `model.safetensors` as `save_pretrained` writes them, `reference.safetensors` and
`meta.json`; with --released also `released/`, the same weights under the names of released checkpoints. docs/end-to-end.md
says what the tensors are and how to compare with them; checks.py measures how exact they are.

The model is transformers' own, in f32. Five kinds of hooks give it the rounding points of a server with a quantised cache
(none of them with --plain):

1. a row of the sliding window, K = V after norm and rotation: BF16, then 448 E4M3 with seven UE8M0 scales and 64 BF16;
2. a compressed entry, after pooling, norm and rotation: the same row; an indexer key: BF16, Hadamard, BF16, MXFP4;
3. the indexer's query, after rotation: as an indexer key;
4. what the indexer's query and weight projections read (the normed latent `qr`, the normed hidden state `x`): BF16;
5. what the router's gate reads: BF16.

All else stays f32: other projections (the compressors' too), pooling, softmax, hyper-connections, experts, logits.
Needs torch, transformers 5.17 and safetensors.
"""
import argparse, itertools, json, math, os, platform, time

import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from released import released_config, released_tensors
from rounding import bf16, fp8_row, index_vector

EXPERTS, SELECTED, CSA_RATIO = 32, 6, 4


# --------------------------------------------------------------------------------------------------------------- model
def make_config(a, ratios):
    layers = len(ratios)
    return DeepseekV4Config(
        vocab_size=256, hidden_size=a.hidden, moe_intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64, q_lora_rank=32, o_groups=2, o_lora_rank=32,
        n_routed_experts=EXPERTS, num_experts_per_tok=SELECTED, n_shared_experts=1, routed_scaling_factor=1.5,
        compress_ratios=ratios, num_hash_layers={"hash": layers, "mixed": layers // 2, "learned": 0}[a.router],
        index_n_heads=64, index_head_dim=128, index_topk=a.topk, sliding_window=128, hc_mult=4,
        rope_parameters={"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
                         "beta_slow": 1},
        num_nextn_predict_layers=0, max_position_embeddings=1048576, bos_token_id=0, eos_token_id=None)


@torch.no_grad()
def make_model(config, seed):
    """Random weights of which every part matters: nothing is zero, one, or lost beside something larger."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).eval()
    for name, p in model.named_parameters():
        if name.endswith("sinks"):
            p.normal_(3, 1)                                   # about a tenth of the softmax of a full window
        elif name.endswith("position_bias"):
            p.normal_(0, 0.5)
        elif "norm" in name:
            p.copy_(bf16(1 + 0.1 * torch.randn_like(p)))      # BF16 in released files, F32 in transformers': equal values
        elif name.endswith("base"):
            p.normal_(0, 0.3)
        elif name.endswith("scale"):
            p.uniform_(0.5, 1.5)
        elif "embed" in name:
            p.normal_(0, 1)
        else:
            p.normal_(0, p.shape[-1] ** -0.5)                 # N(0, 1 / fan-in)
        if name == "lm_head.weight":                          # away from a token's own embedding, so that greedy decoding
            p -= 0.8 * p.shape[-1] ** -0.5 * embedding        # does not say the same token again and again
        elif "embed" in name:
            embedding = p.clone()
        if name.endswith("experts.gate_up_proj"):             # one gate and one value channel of each routed expert reach
            p[:, 0] *= 8                                      # swiglu_limit (10) now and then; the shared expert's never do,
            p[:, p.shape[1] // 2 + 1] *= 8                    # since the first released code did not limit those
        elif name.endswith("experts.down_proj"):
            p[:, :, :2] /= 8
        if not any(kept in name for kept in model._keep_in_fp32_modules_strict):
            p.data = p.data.to(torch.bfloat16)                # what from_pretrained(dtype=bfloat16) keeps in F32 stays F32
    for name, b in model.named_buffers():
        if name.endswith("tid2eid"):
            b.copy_(torch.stack([torch.randperm(EXPERTS)[:SELECTED] for _ in range(config.vocab_size)]))
        elif name.endswith("e_score_correction_bias"):
            b.normal_(0, 0.1)
    return model


# ------------------------------------------------------------------------------------------------- rounding and recording
class Run:
    """A model with hooks that round (unless plain) and record, and its cache; one run a model and time."""

    def __init__(self, model, plain=False):
        self.model, self.plain, self.rows, self.hooks = model, plain, {}, []
        pre = lambda module, f: self.hooks.append(module.register_forward_pre_hook(f))
        post = lambda module, f: self.hooks.append(module.register_forward_hook(f))
        round_input = lambda module, args: (self.round(bf16, args[0]), *args[1:])
        for i, layer in enumerate(model.model.layers):
            if i > 0:                                         # the first layer's follows from the tokens
                post(layer.input_layernorm, lambda module, args, out, i=i: self.add(f"layer.{i}.x", out))
            post(layer, lambda module, args, out, i=i: self.on_layer(i, out))
            pre(layer.mlp.gate, round_input)
            post(layer.mlp.gate, lambda module, args, out, i=i: self.on_route(i, module, out))
            indexer = getattr(layer.self_attn.compressor, "indexer", None)
            if indexer is not None:
                pre(indexer.q_b_proj, round_input)
                pre(indexer.scorer.weights_proj, round_input)
                pre(indexer.scorer, lambda module, args: (self.round(index_vector, args[0]), *args[1:]))
                post(indexer.scorer, lambda module, args, out, i=i: self.on_scores(i, module, args, out))
                post(indexer, lambda module, args, out, i=i: self.on_list(i, out))
        post(model.model.norm, lambda module, args, out: self.add("last", out))
        self.cache = RoundedCache(self)

    def round(self, rounding, x):
        return x if self.plain else rounding(x)

    def add(self, name, x):
        self.rows.setdefault(name, []).append(x.detach().clone() if x.dtype == torch.int32 else x.detach().float().clone())

    def on_layer(self, i, streams):
        self.add(f"layer.{i}.hidden", streams)

    def on_route(self, i, gate, out):
        logits, weights, experts = out
        if not hasattr(gate, "tid2eid"):                      # best first; how clear the choice was, relative to its score
            scores = gate.score_fn(logits) + gate.e_score_correction_bias
            best = scores.gather(1, experts).argsort(dim=1, descending=True, stable=True)
            weights, experts = weights.gather(1, best), experts.gather(1, best)
            last, next_ = scores.topk(SELECTED + 1, 1).values[:, -2:].unbind(1)
            self.add(f"layer.{i}.gap", ((last - next_) / last.abs()).unflatten(0, (self.batch, -1)))
        self.add(f"layer.{i}.experts", experts.int().unflatten(0, (self.batch, -1)))
        self.add(f"layer.{i}.weights", weights.unflatten(0, (self.batch, -1)))

    def on_scores(self, i, scorer, args, scores):
        """Lists: largest score first, the older entry first among equals; all visible, oldest first, if at most k are."""
        query, keys, hidden = args
        k, entries = self.model.config.index_topk, keys.shape[1]
        start = sum(rows.shape[1] for rows in self.rows.get(f"layer.{i}.selected", []))
        visible = ((start + torch.arange(query.shape[1]) + 1) // CSA_RATIO)[:, None]
        entry = torch.arange(entries)
        scores = scores.masked_fill(entry >= visible, -math.inf)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        listed = torch.where(visible > k, order, entry.expand_as(order))[..., :k]
        self.add(f"layer.{i}.selected", torch.where(entry[:k] < visible, listed, -1).int())
        margin = torch.full(scores.shape[:2], math.inf)
        if entries > k:                                       # of the last listed over the next, by what both were summed from
            size = torch.matmul(query.abs(), keys.abs().transpose(-1, -2)[:, None])
            weight = scorer.weights_proj(hidden).abs() * (scorer.weights_scaling * scorer.softmax_scale)
            size = (size * weight[..., None]).sum(2)
            (a, b), (c, d) = (x.gather(-1, order)[..., k - 1:k + 1].unbind(-1) for x in (scores, size))
            margin = torch.where(visible[:, 0] > k, (a - b) / (c + d), math.inf)
        self.add(f"layer.{i}.margin", margin)

    def on_list(self, i, picked):
        """transformers picks the same entries; it promises no order, and none among equal scores, which there are not."""
        assert torch.equal(picked.sort(-1).values, self.rows[f"layer.{i}.selected"][-1].long().sort(-1).values), "a tie"

    @torch.no_grad()
    def forward(self, tokens):
        self.batch = tokens.shape[0]
        self.model(tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def generate(self, prompt, new_tokens):
        """Greedy continuation; the last token is fed as well, so that every token has its rows."""
        self.batch = prompt.shape[0]
        out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=self.cache, do_sample=False,
                                  max_new_tokens=new_tokens, output_logits=True, return_dict_in_generate=True)
        self.forward(out.sequences[:, -1:])
        return out.sequences, torch.stack(out.logits, 1)

    @torch.no_grad()
    def tensors(self):
        for hook in self.hooks:
            hook.remove()
        width = max((rows.shape[2] for name, parts in self.rows.items() if name.endswith("selected") for rows in parts), default=0)
        for name, parts in self.rows.items():
            if name.endswith("selected"):
                self.rows[name] = [F.pad(rows, (0, width - rows.shape[2]), value=-1) for rows in parts]
        tensors = {name: torch.cat(parts, 1) for name, parts in self.rows.items()}
        tensors["logits"] = self.model.lm_head(tensors.pop("last").to(self.model.dtype)).float()
        return tensors


class RoundedCache(DynamicCache):
    """transformers' cache, filled with what comes out of the quantised one; records entries and keys before that."""

    def __init__(self, run):
        super().__init__(config=run.model.config)
        self.run = run
        for i, layer in enumerate(self.layers):
            if hasattr(layer, "update_compressor_states"):
                layer.update_compressor_states = lambda name, new, i=i, store=layer.update_compressor_states: store(
                    name, self.round_entries(i, name, new))

    def update(self, keys, values, layer_idx, *args, **kwargs):
        rows = self.run.round(fp8_row, keys)
        return super().update(rows, rows, layer_idx, *args, **kwargs)

    def round_entries(self, i, name, new):
        self.run.add(f"layer.{i}." + {"compressor": "entries", "indexer": "keys"}[name], new)
        return self.run.round({"compressor": fp8_row, "indexer": index_vector}[name], new)


# ---------------------------------------------------------------------------------------------------------------- main
def load(folder):
    return DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def save(tensors, folder, name):
    path = os.path.join(folder, name)
    safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, path, {"format": "pt"})
    os.chmod(path, 0o644)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seed", type=int, required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--schedule", default="0,4,128,4", help="compression ratio of each layer: 0, 4 or 128")
    p.add_argument("--hidden", type=int, default=64, help="hidden size, a multiple of 32")
    p.add_argument("--topk", type=int, default=512, help="entries that the indexer picks")
    p.add_argument("--router", choices=["hash", "learned", "mixed"], default="hash", help="mixed: the first half by hash")
    p.add_argument("--prompt-len", type=int, default=300)
    p.add_argument("--new-tokens", type=int, default=40)
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--min-margin", type=float, default=0,
                   help="try prompts until the best logit of every generated token leads by this")
    p.add_argument("--tail", type=int, help="store logits and streams of the last TAIL prompt tokens and all generated only")
    p.add_argument("--released", action="store_true", help="also write released/")
    p.add_argument("--plain", action="store_true", help="transformers as it is, without the rounding hooks")
    a = p.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    ratios, seconds, begin = [int(r) for r in a.schedule.split(",")], {}, time.time()
    def lap(name):
        nonlocal begin
        seconds[name], begin = round(time.time() - begin, 2), time.time()

    model = make_model(make_config(a, ratios), a.seed)
    released = os.path.join(a.out, "released")
    model.save_pretrained(a.out)
    os.chmod(os.path.join(a.out, "model.safetensors"), 0o644)
    os.remove(os.path.join(a.out, "generation_config.json"))
    if a.released:
        os.makedirs(released, exist_ok=True)
        save(released_tensors(model), released, "model.safetensors")
        with open(os.path.join(released, "config.json"), "w") as f:
            json.dump(released_config(model.config, ratios), f, indent=2)
    for folder in [a.out] + [released] * a.released:          # transformers' own loader finds the same model in both
        for name, t in load(folder).state_dict().items():
            assert torch.equal(t, model.state_dict()[name].to(t.dtype)), name
    lap("write the model")

    for prompt_seed in itertools.count(1000 * a.seed):
        source = torch.Generator().manual_seed(prompt_seed)
        prompt = torch.randint(2, model.config.vocab_size, (a.batch, a.prompt_len), generator=source)
        run = Run(load(a.out), a.plain)
        tokens, picked_from = run.generate(prompt, a.new_tokens)
        want = run.tensors()
        deciding = want["logits"][:, a.prompt_len - 1:-1]
        assert torch.equal(deciding.argmax(-1), tokens[:, a.prompt_len:]) and (deciding - picked_from).abs().max() < 1e-4
        margin = deciding.topk(2, -1).values.diff().neg()
        if margin.min() >= a.min_margin:
            break
    lap("generate")

    positions = torch.arange(tokens.shape[1])[0 if a.tail is None else max(0, a.prompt_len - a.tail):]
    stored = {n: t[:, positions] if n == "logits" or n.endswith("hidden") else t for n, t in want.items()}
    stored.update(tokens=tokens.int(), positions=positions.int())
    save(stored, a.out, "reference.safetensors")
    options = {name: value for name, value in vars(a).items() if name != "out"}
    near = lambda suffix, limit: sum((t < limit).sum().item() for n, t in want.items() if n.endswith(suffix))
    meta = {
        "made_by": "reference.py", "options": options, "compress_ratios": ratios,
        "seeds": {"weights": a.seed, "prompt": prompt_seed},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
                     "safetensors": safetensors.__version__},
        "positions_with_logits_and_streams": [positions[0].item(), positions[-1].item()],
        "greedy_margin": {"min": margin.min().item(), "median": margin.median().item()},
        "distinct_new_tokens": [len(set(row)) for row in tokens[:, a.prompt_len:].tolist()],
        "logits_standard_deviation": want["logits"].std().item(),
        "near_ties": {"index lists with margin < 1e-5": near("margin", 1e-5), "of them exact": near("margin", 1e-30),
                      "expert choices with gap < 1e-4": near("gap", 1e-4)},
        "tensors": {n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in sorted(stored.items())},
        "seconds": seconds,
        "how": "plain transformers, f32" if a.plain else "transformers in f32, rounded by hooks: see reference.py"}
    with open(os.path.join(a.out, "meta.json"), "w") as f:
        json.dump(meta, f, indent=1)
    print(f"{a.out}: {sum(p.numel() for p in model.parameters())} parameters,", {
        f: os.path.getsize(os.path.join(a.out, f)) for f in ("model.safetensors", "reference.safetensors")}, seconds)


if __name__ == "__main__":
    main()
