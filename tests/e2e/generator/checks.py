#!/usr/bin/env python3
"""How exact a set of reference vectors is, and what shows in it: `checks.py DIR [--golden GOLDEN]`, after `reference.py --out DIR`.

Computes the set again in other ways that are right (all tokens in one forward, f64, disturbed by as much as another order of
summation would) and in ways that are wrong in one part, compares each with the reference, and puts what it finds into
DIR/meta.json under "checks". The bounds of docs/end-to-end.md come from there. --golden: also checks the rounding functions with the
project's golden vectors (needs numpy).
"""
import argparse, json, os, time

import safetensors.torch
import torch
import transformers

from reference import Run, load
from rounding import bf16, fp8_row, hadamard, index_vector, mxfp4


class Variant(Run):
    """A run with a relative error of at most `noise` before every rounding and after every layer; with `feed`, every layer
    reads the reference's streams instead of what the layer before it made; with `instead`, other rounding functions."""

    def __init__(self, model, plain, noise=0.0, feed=None, instead=()):
        super().__init__(model, plain)
        self.noise, self.feed, self.instead = noise, feed, dict(instead)
        self.source = torch.Generator().manual_seed(0)

    def disturb(self, x):
        return x * (1 + self.noise * (2 * torch.rand(x.shape, generator=self.source) - 1)) if self.noise else x

    def round(self, rounding, x):
        return super().round(self.instead.get(rounding, rounding), self.disturb(x))

    def on_layer(self, i, streams):
        streams = self.disturb(streams)
        super().on_layer(i, streams)
        return streams if self.feed is None else self.feed[f"layer.{i}.hidden"].to(streams.dtype)


def summary(parts):
    x = torch.cat([part.flatten() for part in parts]).double()
    return {"max": x.max().item(), "p99": x.quantile(0.99).item(), "median": x.median().item()} if x.numel() else None


def compare(got, want, prompt_len):
    """How far a run is from the reference. Streams and weights: only of rows whose own list and experts are the same."""
    same_token = got["logits"].argmax(-1) == want["logits"].argmax(-1)
    found = {"logits": summary([(got["logits"] - want["logits"]).abs().amax(-1)]),
             "same_token": same_token.double().mean().item(), "all_generated_same": same_token[:, prompt_len - 1:-1].all().item()}
    named = lambda kind: [n for n in want if n.endswith(kind) and want[n].numel()]
    alike = {n: torch.ones(want[n].shape[:2], dtype=torch.bool) for n in named("hidden")}
    for kind, clearness in (("selected", "margin"), ("experts", "gap")):
        count, of, clear = 0, 0, []
        for n in named(kind):
            row = n.replace(kind, "hidden")                   # experts: only where the row's list is the same
            other = alike[row] & (got[n].sort(-1).values != want[n].sort(-1).values).any(-1)
            alike[row] &= ~other
            if n.replace(kind, clearness) in want:
                by = want[n.replace(kind, clearness)]
                count, of, clear = count + other.sum().item(), of + by.isfinite().sum().item(), clear + by[other].tolist()
        if of:
            found[f"{kind} differ"] = {"count": count, "of": of, f"largest {clearness}": max(clear, default=None)}
    relative = lambda n: (got[n] - want[n]).abs().flatten(2).amax(-1) / want[n].abs().max()
    for kind in ("entries", "keys"):
        if named(kind):
            found[kind] = summary([relative(n) for n in named(kind)])
    found["hidden"] = summary([relative(n)[alike[n]] for n in named("hidden")])
    by_id = lambda run, n: run[n].gather(-1, run[n.replace("weights", "experts")].argsort(-1))
    found["weights"] = summary([(by_id(got, n) - by_id(want, n)).abs().amax(-1)[alike[n.replace("weights", "hidden")]]
                                for n in named("weights")])
    return found


def mutations(model):
    """What breaks one part of the model, as far as it has that part: each must show in the logits."""
    tensors = list(model.named_parameters()) + list(model.named_buffers())
    named = lambda *suffixes: [t for n, t in tensors if n.endswith(suffixes)]
    fill = lambda value, *suffixes: [t.fill_(value) for t in named(*suffixes)]
    roll = lambda suffix: [t.copy_(t.roll(1, 0)) for t in named(suffix)]
    transpose = lambda t: t[8:].copy_(t[8:].unflatten(0, (4, 4)).transpose(0, 1).flatten(0, 1).clone())
    layers = model.model.layers
    found = {
        "no sinks": lambda: fill(-1e9, "sinks"),
        "no position bias": lambda: fill(0, "position_bias"),
        "hyper-connections: base 0": lambda: fill(0, "base"),
        "hyper-connections: scale 1": lambda: fill(1, "scale"),
        "hyper-connections: streams mixed by the transposed matrix": lambda: [transpose(t) for t in named("_hc.fn", "_hc.base")],
        "norms of keys and entries without weights": lambda: fill(1, "kv_norm.weight"),
        "norm of the query latent without weights": lambda: fill(1, "q_a_norm.weight"),
        "no limit on the experts' swiglu": lambda: [setattr(layer.mlp.experts, "limit", 1e9) for layer in layers],
    }
    if any(layer.self_attn.rope_layer_type == "main" for layer in layers):
        found["window layers rotated as compressed ones"] = lambda: [
            setattr(layer.self_attn, "rope_layer_type", "compress") for layer in layers]
    if named("tid2eid"):
        found["experts of another token's table row"] = lambda: roll("tid2eid")
    if named("e_score_correction_bias"):
        found["no bias on the choice of experts"] = lambda: fill(0, "e_score_correction_bias")
    return found


def ties_to_zero(x):
    """As index_vector, but E2M1 by strict comparisons, as some kernels round: BF16 values meet ties often."""
    return mxfp4(bf16(hadamard(bf16(x))) * (1 - 2 ** -12))


def check_rounding(golden):
    """The rounding functions give what the project's golden vectors say, byte for byte."""
    import numpy as np
    array = lambda name: torch.from_numpy(np.load(os.path.join(golden, name + ".npy")))
    bits = lambda name: array(name).view(torch.bfloat16).float()
    assert torch.equal(fp8_row(bits("row_in_bf16"))[:, :448], bits("row_v4_dequant")), "FP8 rows"
    assert torch.equal(mxfp4(bits("fp4_in_bf16")), array("mxfp4_dequant")), "MXFP4"
    assert (hadamard(array("idx_q_rope")) - array("idx_q_hadamard")).abs().max() < 1e-6, "Hadamard"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folder")
    p.add_argument("--golden", help="folder of golden vectors to check the rounding functions with")
    a = p.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    begin = time.time()
    if a.golden:
        check_rounding(a.golden)
    with open(os.path.join(a.folder, "meta.json")) as f:
        meta = json.load(f)
    stored = safetensors.torch.load_file(os.path.join(a.folder, "reference.safetensors"))
    tokens, positions = stored["tokens"].long(), stored["positions"].long()
    plain, prompt_len = meta["options"]["plain"], meta["options"]["prompt_len"]

    again = Run(load(a.folder), plain)                        # as it was generated: the prompt, then one token after the other
    again.forward(tokens[:, :prompt_len])
    for token in tokens[:, prompt_len:].split(1, 1):
        again.forward(token)
    want = again.tensors()
    at = lambda n: want[n][:, positions] if n == "logits" or n.endswith("hidden") else want[n]
    checks = {"the stored tensors come out again bit for bit": all(torch.equal(at(n), stored[n]) for n in want)}

    def whole(model=None, plain=plain, **options):
        run = Variant(model or load(a.folder), plain, **options)
        run.forward(tokens)
        return compare(run.tensors(), want, prompt_len)
    right = {"one forward": whole(), "one forward in f64": whole(load(a.folder).double())}
    for noise in (1e-7, 1e-6):
        right[f"noise {noise:g}"] = whole(noise=noise)
    right["layers fed with the reference's streams, f64"] = whole(load(a.folder).double(), feed=want)
    for noise in (1e-7, 1e-6):
        right[f"layers fed with the reference's streams, noise {noise:g}"] = whole(noise=noise, feed=want)
    wrong = {}
    if plain:
        with torch.no_grad():
            d = load(a.folder)(tokens, use_cache=False).logits - want["logits"]
        right["no cache at all"] = {"logits": summary([d.abs().amax(-1)])}
    else:
        wrong["no rounding anywhere"] = whole(plain=True)
        for name, instead in {"rows and entries kept in BF16": {fp8_row: bf16},
                              "inputs of indexer and router not rounded": {bf16: lambda x: x},
                              "indexer's keys and queries kept in BF16": {index_vector: bf16},
                              "indexer's keys and queries with ties to zero": {index_vector: ties_to_zero}}.items():
            wrong[name] = whole(instead=instead)
            wrong[name + ", layers fed with the reference's streams"] = whole(instead=instead, feed=want)
    for name in mutations(load(a.folder)):
        model = load(a.folder)
        with torch.no_grad():
            mutations(model)[name]()
        wrong[name] = {key: value for key, value in whole(model).items() if key in ("logits", "same_token")}
    meta["checks"] = {**checks, "right": right, "wrong": wrong}
    meta["seconds"]["checks"] = round(time.time() - begin, 1)
    with open(os.path.join(a.folder, "meta.json"), "w") as f:
        json.dump(meta, f, indent=1)
    for name, found in {**right, **wrong}.items():
        line = [f"{kind} {x['max']:.2g}/{x['p99']:.2g}/{x['median']:.2g}" for kind, x in found.items() if x and "p99" in str(x)]
        print(f"{name}: " + ", ".join(line), {k: v for k, v in found.items() if not isinstance(v, dict) or "count" in v})
    print("reproduced bit for bit:", checks["the stored tensors come out again bit for bit"], meta["seconds"])


if __name__ == "__main__":
    main()
