"""Makes vectors.json with vLLM's own code: see README.md."""

import ast
import json
import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

VLLM = "0.33.0"
BLOCK = 128


def functions(path, names, scope):
    """Runs the definitions with these names, and nothing else, of a source file."""
    tree = ast.parse(open(path).read())
    found = [node for node in tree.body if getattr(node, "name", None) in names]
    missing = set(names) - {node.name for node in found}
    assert not missing, f"{path} has no {missing}"
    exec(compile(ast.Module(found, []), path, "exec"), scope)
    return scope


def load(root):
    """vLLM's hashing, block hashes and events."""
    hashing = {"__name__": "hashing"}
    exec(compile(open(f"{root}/vllm/utils/hashing.py").read(), "hashing.py", "exec"), hashing)
    assert "PYTHONHASHSEED" not in os.environ, "vLLM takes its seed from PYTHONHASHSEED"
    scope = {
        **{"Any": Any, "Callable": Callable, "Iterable": Iterable, "Sequence": Sequence},
        **{"Request": Any, "BlockHash": bytes, "ExternalBlockHash": bytes | int, "os": os},
        "envs": types.SimpleNamespace(VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=True),
        "_NON_CRYPTO_HASH_FUNCTIONS": frozenset(),
        "DEFAULT_NONE_HASH_SEED": "vllm-none-hash",
    }
    names = ["resolve_none_hash_seed", "init_none_hash", "_gen_lora_extra_hash_keys"]
    names += ["_gen_mm_extra_hash_keys", "_gen_prompt_embeds_extra_hash_keys"]
    names += ["generate_block_hash_extra_keys", "to_event_extra_keys", "hash_block_tokens"]
    names += ["maybe_convert_block_hash"]
    functions(f"{root}/vllm/v1/core/kv_cache_utils.py", names, scope)
    events = {"msgspec": msgspec, "Any": Any, "ExternalBlockHash": bytes | int}
    names = ["EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared"]
    functions(f"{root}/vllm/distributed/kv_events.py", names + ["KVEventBatch"], events)
    scope["init_none_hash"](hashing["sha256_cbor"])
    return hashing["sha256_cbor"], scope, events


def chain(vllm, salt, adapter, tokens):
    """The hashes of the blocks of a prompt, and the extra keys that their events have."""
    sha256_cbor, code, _ = vllm
    lora = types.SimpleNamespace(lora_name=adapter, lora_path="") if adapter else None
    request = types.SimpleNamespace(
        lora_request=lora, cache_salt=salt or None, mm_features=[], prompt_embeds=None
    )
    parent, hashes, extras = None, [], []
    for start in range(0, len(tokens), BLOCK):
        end = start + BLOCK
        extra, _ = code["generate_block_hash_extra_keys"](request, start, end, 0)
        parent = code["hash_block_tokens"](sha256_cbor, parent, tokens[start:end], extra)
        hashes.append(parent)
        extras.append(extra)
    return hashes, code["to_event_extra_keys"](extras)


def main(root):
    vllm = load(root)
    _, code, events = vllm
    rng = random.Random(4)
    chains, messages = [], []
    edges = [0, 1, 23, 24, 255, 256, 65535, 65536, 129279, 2**32 - 1]
    for salt, adapter in [("", ""), ("tenant", ""), ("", "adapter"), ("Zürich " * 40, "a" * 24)]:
        tokens = [(edges * BLOCK)[at] for at in range(BLOCK)]
        tokens += [rng.randrange(129280) for _ in range(2 * BLOCK)]
        hashes, extra = chain(vllm, salt, adapter, tokens)
        wire = [code["maybe_convert_block_hash"](h) for h in hashes]
        chains.append({"salt": salt, "adapter": adapter, "tokens": tokens,
                       "hashes": [h.hex() for h in hashes], "wire": [str(w) for w in wire]})
        stored = events["BlockStored"](
            block_hashes=wire[1:], parent_block_hash=wire[0], token_ids=tokens[BLOCK:],
            block_size=BLOCK, lora_id=None, medium="GPU", lora_name=adapter or None,
            extra_keys=extra[1:] if any(extra[1:]) else None,
        )
        first = events["BlockStored"](
            block_hashes=wire[:1], parent_block_hash=None, token_ids=tokens[:BLOCK],
            block_size=BLOCK, lora_id=None, medium="GPU", lora_name=adapter or None,
            extra_keys=extra[:1] if any(extra[:1]) else None,
        )
        removed = events["BlockRemoved"](block_hashes=wire[::-1], medium="GPU")
        batch = events["KVEventBatch"](
            ts=1700000000.25, events=[events["AllBlocksCleared"](), first, stored, removed],
            data_parallel_rank=3,
        )
        messages.append(msgspec.msgpack.encode(batch).hex())
    root_hash = code["NONE_HASH"].hex()
    vectors = {"vllm": VLLM, "root": root_hash, "chains": chains, "messages": messages}
    json.dump(vectors, open("vectors.json", "w"), ensure_ascii=False, indent=1)


main(sys.argv[1])
